"""Load each slice in a random state that depends on its samples only.

Augmentation draws from torch's, NumPy's and Python's global generators. If they were
not reseeded, a sample would depend on which process loads it and on what that process loaded before. So every sample is
loaded in a state derived from (seed, epoch, sample), a slice is collated in one derived from its first sample, and the
states of the calling process are restored afterwards. Generators that the data set holds are treated in the same way.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import Dataset

from lockstep.data.generators import OwnGenerator, find_generators
from lockstep.errors import LockstepError
from lockstep.shards import derive_seed

SampleKey = tuple[int, int]
"""Seed of the sample's random state, and its index."""


@dataclass(frozen=True, slots=True)
class FailedSlice:
    """The error of a slice that could not be loaded, in place of the slice.

    A `DataLoader` would wrap an exception of a loading process into one whose message is a traceback; this way ours
    reaches the user as it was raised.
    """

    error: LockstepError
    """Why."""


@final
class KeyedDataset(Dataset[Any]):
    """A data set of whole slices, asked for by the keys of their samples.

    Args:
        dataset: Makes a sample of an index.
        collate: Makes a slice of a list of samples.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitems__(self, keys: list[SampleKey]) -> Any:
        """Make one collated slice; the name is that of DataLoader's protocol for whole batches."""
        own = self._find_own()
        with _generators_restored(own):
            try:
                samples = [self._make(seed, index, own) for seed, index in keys]
                if len(found := self._find_own()) > len(own):  # they were made by the first sample
                    own = found
                    samples = [self._make(seed, index, own) for seed, index in keys]
            except LockstepError as error:
                return FailedSlice(error)
            _seed(derive_seed("collate", keys[0][0]), own)
            return self._collate(samples)

    def _find_own(self) -> list[OwnGenerator]:
        return find_generators((self._dataset, self._collate))

    def _make(self, seed: int, index: int, own: Sequence[OwnGenerator]) -> Any:
        _seed(seed, own)
        return self._dataset[index]


def _seed(seed: int, own: Sequence[OwnGenerator]) -> None:
    for each in own:
        each.seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def _generators_restored(own: Sequence[OwnGenerator]) -> Iterator[None]:
    put_back = [each.keep_state() for each in own]
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        for put in put_back:
            put()
