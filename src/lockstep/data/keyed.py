"""Samples in a random state of their own.

Augmentation draws from torch's, NumPy's and Python's global generators. Were these left to run on, what a sample looks
like would depend on which process made it and what it made before. So every sample is made in a state derived from
(seed, epoch, sample), and the states of the calling process are put back afterwards.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.data import Dataset

SampleKey = tuple[int, int]
"""Seed of the sample's random state, and its index."""


@final
class KeyedDataset(Dataset[Any]):
    """A map-style data set whose items are asked for with a seed each."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[SampleKey]) -> list[Any]:
        """Make the samples of one slice; the name is that of DataLoader's protocol for whole batches."""
        with _generators_restored():
            return [self._make(seed, index) for seed, index in keys]

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])[0]

    def _make(self, seed: int, index: int) -> Any:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        return self._dataset[index]


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
