"""Data sets of one length are told apart, where tensors hold them."""

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data.contents import content_number


def numbers(start: int, length: int = 500) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + length), torch.zeros(length, 2, dtype=torch.bfloat16))


class Refusing(Dataset[int]):
    """May not be asked for a sample."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError(index)


def test_equal_data_have_equal_numbers_and_others_have_others() -> None:
    assert content_number(numbers(0)) == content_number(numbers(0)) != content_number(numbers(1))
    halves = [Subset(numbers(0), range(start, start + 250)) for start in (0, 0, 1)]
    first, again, other = map(content_number, halves)
    assert first == again != other
    both = [content_number(ConcatDataset([numbers(0), numbers(start)])) for start in (2, 2, 3)]
    assert both[0] == both[1] != both[2]


def test_of_other_data_sets_nothing_is_said() -> None:
    assert content_number(Refusing()) == 0
    assert content_number(ConcatDataset([numbers(0), Subset(numbers(0), [])])) != 0
    assert content_number(Subset(Refusing(), [1, 2])) == 0
