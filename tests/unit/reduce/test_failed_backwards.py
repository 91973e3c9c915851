"""A backward that fails on one rank, wherever it fails, is an error of that backward on every rank, and no rank waits.

Ranks are threads: a rank that makes another call than the others, or none, is an error at once.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.threaded_ranks import run_ranks
from tests.unit.reduce.reducers import Hook, mean_hook, reducer_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.comm import World
from lockstep.errors import GroupError, ReductionError
from lockstep.reduce import (
    BucketLimits,
    CommHook,
    HookReduction,
    MeanReduction,
    Reducer,
    ReducerOptions,
    ShardReducer,
    TrainedModel,
)
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.reduction import Finish
from lockstep.shards import even_ranges

NUM_STEPS = 4
FAILING_RANK = 1
WIDTH = 12
WHOLE = "whole"


class Layers(nn.Module):
    """Three layers, each of its own bucket, some of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, inputs: Tensor, used: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for number in used:
            inputs = self.layers[number](inputs)
        return inputs


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def outcome_of(step: Callable[[], None]) -> str:
    try:
        step()
    except (ValueError, ReductionError) as error:
        return str(error)
    return WHOLE


def fail(*_arguments: object) -> Any:
    raise ValueError("only here")


def check(
    found: list[list[str]], failing_step: int, other: str = "1 of 3 ranks ended in an exception (rank 1)"
) -> None:
    for rank, outcomes in enumerate(found):
        assert [outcome != WHOLE for outcome in outcomes] == [step == failing_step for step in range(NUM_STEPS)], found
        assert ("only here" if rank == FAILING_RANK else other) in outcomes[failing_step]


@pytest.mark.parametrize("with_backward", [True, False])
@pytest.mark.parametrize("failing_step", [0, 2])
def test_an_error_when_a_backward_begins(failing_step: int, with_backward: bool) -> None:
    # The phase was changed after `begin`, so the rank had not begun and left the others waiting.
    def program(world: World) -> list[str]:
        model = Layers()
        reducer = reducer_of(model, world, 1)
        look = reducer.plan.look

        def step(number: int) -> None:
            reducer.finish_interrupted()
            fails = (world.rank, number) == (FAILING_RANK, failing_step)
            reducer.plan.look = fail if fails else look  # type: ignore[method-assign]
            if with_backward or not fails:
                output = model(rows_of(world.rank, number))
                reducer.mark(output, num_samples=3)
                output.sum().backward()
            else:
                reducer.watch.begin_without_backward(reducer)

        outcomes = [outcome_of(partial(step, number)) for number in range(NUM_STEPS)]
        reducer.finish_interrupted()
        return outcomes

    check(run_ranks(3, program, poisons=True), failing_step)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("used", [(0, 2), (0, 1, 2), (2,)])
@pytest.mark.parametrize("failing_step", range(NUM_STEPS))
def test_a_failed_backward_where_unused_buckets_are_not_sent(
    failing_step: int, used: tuple[int, ...], is_asynchronous: bool
) -> None:
    # The failed rank did not send the buckets that it had no gradient for, and the others waited for these.
    def program(world: World) -> list[str]:
        model = Layers()
        reducer = reducer_of(model, world, 1, skips_unused=True, is_asynchronous=is_asynchronous)

        def step(number: int) -> None:
            reducer.finish_interrupted()
            handle = None
            if (world.rank, number) == (FAILING_RANK, failing_step):
                handle = model.layers[used[-1]].weight.register_hook(fail)
            try:
                output = model(rows_of(world.rank, number), used)
                reducer.mark(output)
                output.sum().backward()
            finally:
                if handle is not None:
                    handle.remove()

        outcomes = [outcome_of(partial(step, number)) for number in range(NUM_STEPS)]
        reducer.finish_interrupted()
        return outcomes

    check(run_ranks(3, program, poisons=True), failing_step)


def test_unused_buckets_are_not_sent_and_those_that_one_rank_uses_are() -> None:
    def program(world: World) -> tuple[list[int], list[list[float] | None]]:
        model = Layers()
        reducer = reducer_of(model, world, 1, skips_unused=True)
        sent, found = [], []
        for used in [(0,), (0,), (0, 1) if world.rank else (0,), (0,), (0,)]:
            model.zero_grad()
            output = model(torch.ones(1, WIDTH), used)
            reducer.mark(output)
            output.sum().backward()
            sent.append(reducer.schedule.num_buckets_sent)
            gradient = model.layers[1].bias.grad
            found.append(None if gradient is None else gradient.tolist())
        return sent, found

    for sent, found in run_ranks(2, program, poisons=True):
        assert sent[1] == 2, "weight and bias of the one layer that is used"
        assert sent[2] == 4
        assert sent[4] == 2
        assert found[:2] == [None, None]
        assert found[2] == [0.5] * WIDTH, "a rank that uses a layer alone has its share of the mean"
        assert found[3:] == [None, None]


def before_its_call(_hook: Hook) -> Hook:
    return fail


def after_its_call(hook: Hook) -> Hook:
    def failing(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        hook(state, bucket)
        raise ValueError("only here")

    return failing


def in_its_callback(hook: Hook) -> Hook:
    return lambda state, bucket: hook(state, bucket).then(fail)


@pytest.mark.parametrize("failing_bucket", [0, 5])
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("where", [before_its_call, after_its_call, in_its_callback])
def test_a_communication_hook_that_fails_on_one_rank(
    where: Callable[[Hook], Hook], failing_step: int, failing_bucket: int
) -> None:
    # The rank raised, called its hook again in the next forward, and the others waited in their hooks.
    def program(world: World) -> tuple[list[str], float]:
        model = Layers()
        reducer = reducer_of(model, world, 1)
        number = 0

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            fails = (world.rank, number, bucket.index()) == (FAILING_RANK, failing_step, failing_bucket)
            whole = mean_hook(world)
            return (where(whole) if fails else whole)(state, bucket)

        reducer.use_reduction(HookReduction(CommHook(function=hook, state=None), world), only_gradients=True)

        def step() -> None:
            reducer.finish_interrupted()
            model.zero_grad()
            output = model(torch.full((1, WIDTH), world.rank + 1.0), (0,))
            reducer.mark(output)
            output.sum().backward()

        outcomes = []
        while number < NUM_STEPS:
            outcomes.append(outcome_of(step))
            number += 1
        reducer.finish_interrupted()
        assert model.layers[0].weight.grad is not None
        return outcomes, model.layers[0].weight.grad[0, 0].item()

    found = run_ranks(3, program, poisons=True)
    check([outcomes for outcomes, _ in found], failing_step)
    assert [gradient for _, gradient in found] == [2.0] * 3


class NoMemory(TorchDispatchMode):
    """A device whose memory is used up: no tensor of any size can be made any more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if is_in_group():
            return result
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known
            if is_new and leaf.numel() > SCALARS:
                raise torch.OutOfMemoryError(f"no memory for {leaf.numel()} elements")
        return result


def is_in_group() -> bool:
    """Return whether a group makes the call: it needs little memory, and finds what the failed frames have released."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not any(name in frame.f_code.co_filename for name in ("/threaded_", "/comm/")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name != "run"


SCALARS = 64
"""Statuses and counts are made all the same: they are a few numbers."""


@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_rank_without_memory_takes_part_with_what_it_has(failing_step: int, holds_gradients: bool) -> None:
    # It copied what others held and made partials of zeros, which raised again, and the others waited.
    def program(world: World) -> list[str]:
        model = Layers()
        reducer = reducer_of(model, world, 1, is_asynchronous=True)
        held = []

        def step(number: int) -> None:
            reducer.finish_interrupted()
            model.zero_grad()
            output = model(rows_of(world.rank, number))
            reducer.mark(output)
            if (world.rank, number) != (FAILING_RANK, failing_step):
                output.sum().backward()
                held.append([parameter.grad for parameter in model.parameters()] if holds_gradients else [])
                return
            handle = model.layers[0].weight.register_hook(fail)
            try:
                output.sum().backward()
            finally:
                handle.remove()
                with NoMemory():  # type: ignore[no-untyped-call]
                    reducer.finish_interrupted()

        return [outcome_of(partial(step, number)) for number in range(NUM_STEPS)]

    check(run_ranks(3, program), failing_step)


@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_worker_without_memory_fails_its_step_on_all(failing_step: int) -> None:

    def program(world: World) -> list[str]:
        with asynchronous_device() as device:
            model = Layers().to(device.name)
            shards = ShardReducer(TrainedModel(model), world, 7, BucketLimits(sizes_bytes=(1,)))
            outcomes = [
                outcome_of(partial(run_shards, world, model, shards, number, fails=number == failing_step))
                for number in range(NUM_STEPS)
            ]
            shards.close()
            return outcomes

    check(run_ranks(3, program, poisons=True), failing_step)


def run_shards(world: World, model: nn.Module, shards: ShardReducer, number: int, *, fails: bool) -> None:
    model.zero_grad()
    ranges = even_ranges(world.world_size, 7)
    try:
        for task in shards.begin(ranges):
            loss = model(rows_of(task.shard, number).to("privateuseone:0")).sum()
            shards.mark(loss, task)
            loss.backward()
            if fails and world.rank == FAILING_RANK:
                raise torch.OutOfMemoryError("no memory")  # noqa: TRY301 - as an operation does
            shards.end(task)
    except torch.OutOfMemoryError:
        with NoMemory():  # type: ignore[no-untyped-call]
            shards.fail(ranges)
        raise ValueError("only here") from None


@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("failing_bucket", [0, 3, 5])
def test_a_device_that_fails_when_a_bucket_is_sent_is_an_error_on_every_rank(
    failing_bucket: int, failing_step: int
) -> None:
    # The other ranks waited for a message that did not come.
    def program(world: World) -> list[str]:
        model = Layers()
        mean = MeanReduction(world)
        number = 0

        class Failing:
            """Averages until the device fails."""

            scale = mean.scale
            is_one_at_a_time = False
            runs_users_code = False

            def all_reduce(self, bucket: Bucket, *, index: int, is_last: bool, waits: bool) -> Finish:
                if (world.rank, number, index) == (FAILING_RANK, failing_step, failing_bucket):
                    raise RuntimeError("CUDA error: device-side assert triggered")
                return mean.all_reduce(bucket, index=index, is_last=is_last, waits=waits)

            def expect_nothing(self) -> None:
                """Do nothing."""

        options = ReducerOptions(purpose="a test", limits=BucketLimits(sizes_bytes=(1,)), local_mean=mean)
        with asynchronous_device() as device:
            model.to(device.name)
            reducer = Reducer(TrainedModel(model), world, options, Failing())
            for number in range(failing_step + 1):
                reducer.finish_interrupted()
                output = model(rows_of(world.rank, number).to(device.name))
                reducer.mark(output)
                if number < failing_step:
                    output.sum().backward()
            with pytest.raises(GroupError) as raised:
                output.sum().backward()
            reducer.close()
            return [str(raised.value), str(raised.value.__cause__)]

    for rank, (error, cause) in enumerate(run_ranks(3, program)):
        assert "Rank 1 could not send its gradients" in error
        assert ("device-side assert" in cause) == (rank == FAILING_RANK)
