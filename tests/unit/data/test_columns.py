from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.data.keyed import read_columns


class Noisy(TensorDataset):
    """A data set that looks like torch's, and draws."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (self.tensors[0][index] + torch.rand(()),)


def columns() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(9, 2, 3), torch.arange(9), torch.rand(9, 4).bfloat16(), torch.rand(9) > 0.5


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(*columns()),
        Subset(TensorDataset(*columns()), [8, 7, 6, 5, 4, 3, 2, 1, 0]),
        Subset(Subset(TensorDataset(*columns()), range(9)), [0, 2, 4, 6, 8]),
    ],
)
def test_columns_are_what_collating_samples_gives(data: Dataset[Any]) -> None:
    indices = [3, 0, 4, 4]
    expected = default_collate([data[index] for index in indices])
    found = read_columns(data, indices)
    assert found is not None
    assert type(found) is type(expected)
    for ours, collated in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (collated.dtype, collated.stride())
        assert torch.equal(ours, collated)


@pytest.mark.parametrize(
    "data",
    [
        Noisy(torch.zeros(9)),
        ConcatDataset([TensorDataset(torch.zeros(9))]),
        Subset(TensorDataset(torch.zeros(9)), [-1] * 9),
        Subset(TensorDataset(torch.zeros(2)), range(9)),
        TensorDataset(torch.zeros(9, requires_grad=True)),
        TensorDataset(torch.zeros(2, 9).t()),
        TensorDataset(torch.zeros(9, dtype=torch.complex64).conj()),
    ],
)
def test_what_may_give_something_else_is_asked_sample_by_sample(data: Dataset[Any]) -> None:
    assert read_columns(data, [3, 0, 4]) is None


def test_a_sample_outside_of_the_tensors_is_the_data_sets_own_error() -> None:
    data = Subset(TensorDataset(torch.zeros(4)), range(9))
    loader = ShardedLoader(data, batch_size=9, num_shards=1, world=World(rank=0, world_size=1, group=None))
    with pytest.raises(IndexError, match="out of bounds"):
        list(loader.epoch(0))


def test_a_subclass_that_draws_gets_a_random_state_for_each_sample() -> None:
    world = World(rank=0, world_size=1, group=None)

    def load(num_shards: int) -> list[float]:
        loader = ShardedLoader(
            Noisy(torch.zeros(8)), batch_size=8, num_shards=num_shards, seed=3, shuffle=False, world=world
        )
        return [value for batch in loader.epoch(0) for part in batch.slices for value in part.data[0].tolist()]

    assert load(1) == load(4)
    assert len(set(load(1))) == 8
