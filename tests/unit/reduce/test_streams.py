"""Backwards on several streams, and waits for the device: with a device on which either mistake is an error.

A `StreamError` is raised where a bucket is packed before a gradient that another stream accumulates, sent before it is
packed, or read before it is reduced.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import FakeDevice, StreamError
from tests.support.threaded_ranks import run_ranks
from tests.support.two_streams import TwoBranches
from tests.unit.reduce.reducers import gradients, mean_hook, reducer_of
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.reduce import (
    BucketLimits,
    CommHook,
    HookReduction,
    Reducer,
    ShardReducer,
    TrainedModel,
)
from lockstep.reduce.slot import BackwardStreams
from lockstep.shards import even_ranges

NUM_STEPS = 4
SMALL, LARGE = 3, 130  # a large gradient is copied to its bucket when it arrives, a small one with others
MANY, ONE = 1, 1 << 20


def rows_of(rank: int, step: int, width: int) -> Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients_of(model: nn.Module) -> list[float]:
    # Clones first: they read on the current stream.
    return torch.cat([each.cpu().flatten() for each in gradients(model)]).tolist()


def expected_gradients(num_ranks: int, width: int, *, is_mean: bool) -> list[float]:
    with asynchronous_device() as device:
        model = TwoBranches(device, width, ends_on_side=False)
        loss = sum(model(rows_of(rank, NUM_STEPS - 1, width)).square().mean() for rank in range(num_ranks))
        assert isinstance(loss, Tensor)
        (loss / num_ranks if is_mean else loss).backward()
        return gradients_of(model)


def train(device: FakeDevice, model: nn.Module, reducer: Reducer, rank: int, width: int) -> list[float]:
    for step in range(NUM_STEPS):
        model.zero_grad()
        output = model(rows_of(rank, step, width).to(device.name))
        reducer.mark(output)
        output.square().mean().backward()
    found = gradients_of(model)
    reducer.close()
    return found


@pytest.mark.parametrize("limit", [MANY, ONE], ids=["many", "one"])
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("ends_on_side", [False, True])
def test_a_bucket_waits_for_the_gradients_of_every_stream(ends_on_side: bool, width: int, limit: int) -> None:
    # It was packed on the stream of its last gradient, before the gradients of the other one were there.
    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            model = TwoBranches(device, width, ends_on_side=ends_on_side).to(device.name)
            return train(device, model, reducer_of(model, world, limit), world.rank, width)

    expected = expected_gradients(2, width, is_mean=True)
    for found in run_ranks(2, program):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("ends_on_side", [False, True])
def test_without_those_waits_a_stream_error_is_seen(ends_on_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackwardStreams, "join", lambda _streams: None)

    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            model = TwoBranches(device, SMALL, ends_on_side=ends_on_side).to(device.name)
            return train(device, model, reducer_of(model, world, 60), world.rank, SMALL)

    with pytest.raises(StreamError, match="may not be there yet"):
        run_ranks(1, program)


@pytest.mark.parametrize("ends_on_side", [False, True])
def test_what_a_hook_reduces_is_there_for_the_stream_that_reads_it(ends_on_side: bool) -> None:
    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            model = TwoBranches(device, SMALL, ends_on_side=ends_on_side).to(device.name)
            reducer = reducer_of(model, world, MANY)
            reducer.use_reduction(
                HookReduction(CommHook(function=mean_hook(world), state=None), world), only_gradients=True
            )
            return train(device, model, reducer, world.rank, SMALL)

    expected = expected_gradients(2, SMALL, is_mean=True)
    for found in run_ranks(2, program):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("ends_on_side", [False, True])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_on_two_streams_are_added_when_they_are_there(num_shards: int, ends_on_side: bool) -> None:
    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            model = TwoBranches(device, SMALL, ends_on_side=ends_on_side).to(device.name)
            shards = ShardReducer(TrainedModel(model), world, num_shards, BucketLimits(sizes_bytes=(60,)))
            for step in range(NUM_STEPS):
                model.zero_grad()
                for task in shards.begin(even_ranges(2, num_shards)):
                    loss = model(rows_of(task.shard, step, SMALL).to(device.name)).square().mean()
                    shards.mark(loss, task)
                    loss.backward()
                    shards.end(task)
            found = gradients_of(model)
            shards.close()
            return found

    expected = expected_gradients(num_shards, SMALL, is_mean=False)
    for found in run_ranks(2, program):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


class Rarely(nn.Module):
    """Layers in buckets of their own, with buffers, some of which one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor, used: tuple[int, ...]) -> Tensor:
        for number in used:
            inputs = self.layers[number](inputs)
        output: Tensor = self.norm(inputs)
        return output


USED = {0: (0, 1, 2), 1: (0, 3)}


def steps_of(world: World, device: FakeDevice, step: Callable[[Tensor], None]) -> list[list[str]]:
    """Return what the host has waited for in each of several steps."""
    rows = [rows_of(world.rank, number, 4).to(device.name) for number in range(NUM_STEPS)]
    found = []
    for each in rows:
        before = len(device.waits)
        step(each)
        found.append(device.waits[before:])
    return found


def test_a_step_of_a_wrapped_model_never_waits_for_the_device() -> None:
    # It read the counts of each bucket with a parameter that was not used, and the order of arrival.
    def program(world: World) -> list[list[str]]:
        with asynchronous_device() as device:
            model = Rarely().to(device.name)
            wrapped = ls.DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.00001)

            def step(rows: Tensor) -> None:
                model.zero_grad()
                # It may wait for what the last step has left, when the device has this one to do.
                with nullcontext() if wrapped.reducer.num_reductions == 0 else device.no_blocking_reads():
                    wrapped(rows, USED[world.rank]).square().mean().backward()

            found = steps_of(world, device, step)
            wrapped.reducer.close()
            return found

    for waits in run_ranks(2, program, has_default_group=True):
        assert waits[1:] == [[]] * (NUM_STEPS - 1)
        assert not [wait for wait in waits[0] if "reduce/" in wait]


def test_a_group_without_a_cpu_backend_waits_for_the_status_and_once_for_all_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.reduce.current_plan.has_cpu_backend", lambda _group: False)

    def program(world: World) -> list[list[str]]:
        with asynchronous_device() as device:
            model = Rarely().to(device.name)
            reducer = reducer_of(model, world, MANY)

            def step(rows: Tensor) -> None:
                model.zero_grad()
                output = model(rows, USED[world.rank])
                reducer.mark(output)
                output.square().mean().backward()

            found = steps_of(world, device, step)
            reducer.close()
            return found

    for waits in run_ranks(2, program):
        for found in waits[1:]:
            assert len(found) == 2, found
            assert all("reduce/status" in wait for wait in found)
