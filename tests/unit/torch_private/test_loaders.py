"""What we rely on of a DataLoader; the assertion says what breaks without it."""

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Sampler

from lockstep.torch_private.loaders import LoaderIterator, is_before_first_batch, num_yielded

PEEK = "the sampler's warning: somebody who looks at one batch would be warned of a repeated epoch"


class Noting(Sampler[int]):
    """Notes for each index, and for the end, whether the loader has returned a batch."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(3):
            self.noted.append(is_before_first_batch())
            yield index
        self.noted.append(is_before_first_batch())

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(("workers", "expected"), [(0, [True, False, False, False]), (2, [True, True, True, True])])
def test_indices_drawn_before_the_first_batch_are_told_from_later_ones(workers: int, expected: list[bool]) -> None:
    sampler = Noting()
    list(DataLoader([0, 1, 2], 1, sampler=sampler, num_workers=workers))
    assert sampler.noted == expected, PEEK


def test_the_iterator_of_a_loader_counts_its_batches() -> None:
    iterator = iter(DataLoader(range(5), batch_size=2))
    assert isinstance(iterator, LoaderIterator), "DistributedDataParallel: a batch skipped on one rank is not found"
    assert num_yielded(iterator) == 0
    assert [num_yielded(iterator) for _ in iterator] == [1, 2, 3]
