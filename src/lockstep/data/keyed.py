"""Slices in a random state of their own.

Augmentation draws from torch's, NumPy's and Python's global generators. Were these left to run on, what a sample looks
like would depend on which process made it and what it made before. So every sample is made in a state derived from
(seed, epoch, sample), a slice is collated in one derived from its first sample, and the states of the calling process
are put back afterwards.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import Dataset

from lockstep.errors import LockstepError
from lockstep.shards import derive_seed

SampleKey = tuple[int, int]
"""Seed of the sample's random state, and its index."""


@dataclass(frozen=True, slots=True)
class FailedSlice:
    """Stands for a slice that could not be made.

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
        with _generators_restored():
            try:
                samples = [self._make(seed, index) for seed, index in keys]
            except LockstepError as error:
                return FailedSlice(error)
            _seed(derive_seed("collate", keys[0][0]))
            return self._collate(samples)

    def _make(self, seed: int, index: int) -> Any:
        _seed(seed)
        return self._dataset[index]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def _generators_restored() -> Iterator[None]:
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
