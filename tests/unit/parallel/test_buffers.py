"""Buffers of a wrapped module; ranks are threads."""

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World


def rows(rank: int) -> Tensor:
    return torch.full((4, 3), float(rank + 1))


def add_a_norm_after_wrapping(world: World) -> list[float]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model = ls.DistributedDataParallel(net)
    model(rows(world.rank)).sum().backward()
    torch.manual_seed(0)
    net[1] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(rows(world.rank)).sum().backward()
    found: list[float] = net[1][1].running_mean.tolist()
    return found


def add_a_buffer_after_wrapping(world: World) -> list[float]:
    net = nn.Linear(3, 3)
    model = ls.DistributedDataParallel(net)
    net.register_buffer("scale", torch.full((2,), float(world.rank)))
    model(rows(world.rank))
    return net.scale.tolist()


@pytest.mark.parametrize("script", [add_a_norm_after_wrapping, add_a_buffer_after_wrapping])
def test_buffers_that_come_after_wrapping_are_rank_0s(script: Callable[[World], list[float]]) -> None:
    first, second = run_ranks(2, script, has_default_group=True)
    assert first == second


def wrap_with(world: World, buffer: Tensor, **options: bool) -> None:
    net = nn.Linear(3, 3)
    net.register_buffer("projection", buffer)
    ls.DistributedDataParallel(net, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_local", [True, False])
def test_buffers_that_are_not_sent_and_differ_are_warned_of(size: int, is_local: bool) -> None:
    def wrap(world: World) -> None:
        wrap_with(
            world, torch.full((2 if world.rank == 0 else size,), float(world.rank)), broadcast_buffers=not is_local
        )

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if is_local or size == 2:
            run_ranks(2, wrap, has_default_group=True)
    texts = [str(each.message) for each in warned if "projection" in str(each.message)]
    assert len(texts) == 2 * is_local
    assert all("filterwarnings" in text for text in texts)
