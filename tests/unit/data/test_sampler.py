import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from lockstep.data import DistributedSampler


def dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


@pytest.mark.parametrize("length", [1, 2, 7, 12, 100])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_order_is_torchs(length: int, num_replicas: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(num_replicas):
        ours = DistributedSampler(dataset(length), num_replicas, rank, shuffle, 7, drop_last)
        torchs: TorchSampler[int] = TorchSampler(dataset(length), num_replicas, rank, shuffle, 7, drop_last)
        if drop_last and length % num_replicas:
            # torch takes ceil((length - n) / n) per rank, which is the same number.
            assert ours.num_samples == torchs.num_samples
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        assert ours.total_size == torchs.total_size


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_without_padding_each_index_comes_exactly_once(length: int, num_replicas: int) -> None:
    samplers = [DistributedSampler(dataset(length), num_replicas, rank, pad=False) for rank in range(num_replicas)]
    assert sorted(index for sampler in samplers for index in sampler) == list(range(length))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]


def test_epochs_have_different_orders() -> None:
    sampler = DistributedSampler(dataset(50), 1, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_rank_outside_the_world_is_refused_in_torchs_words() -> None:
    with pytest.raises(ValueError, match=r"Invalid rank 3, rank should be in the interval \[0, 2\]"):
        DistributedSampler(dataset(5), 3, 3)


def test_dropping_and_not_padding_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="choose one"):
        DistributedSampler(dataset(5), 1, 0, drop_last=True, pad=False)
