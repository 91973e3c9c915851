"""How one bucket is reduced: on threads as ranks, whose group changes its outputs in `wait()`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.reduce import BucketLimits, CommHook, HookReduction, MeanReduction, TrainedModel, TreeReduction
from lockstep.reduce.buckets import Bucket, allocate_buckets
from lockstep.reduce.partials import Gradients, Partials
from lockstep.reduce.plan import plan_buckets
from lockstep.reduce.reduction import BucketReduction
from lockstep.reduce.shard_reducer import may_accumulate_in_place
from lockstep.shards import add_in_tree_order, even_ranges, partial_nodes_by_size, plan_shard_tasks

FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def bucket_of(length: int, dtype: torch.dtype, world: World) -> tuple[Bucket, nn.Parameter]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(length, dtype=dtype))])
    trained = TrainedModel(model).trained
    assert world.group is not None
    plan = plan_buckets([each.spec for each in trained], BucketLimits(), only_gradients=True)
    (bucket,) = allocate_buckets(plan, trained, world.group, as_view=True).buckets
    return bucket, trained[0].parameter


def numbers(seed: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of such different sizes that the order of addition shows in their sums."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-4, 5, (length,), generator=generator)).to(dtype)


def fill(bucket: Bucket, parameter: nn.Parameter, values: Tensor, scale: float) -> None:
    parameter.grad = values.clone()
    for slot in bucket.slots:
        slot.has_arrived = True
    bucket.prepare(scale)


def reduced(reduction: BucketReduction, bucket: Bucket) -> Tensor:
    reduction.all_reduce(bucket, index=0, is_last=True, waits=False)()
    return bucket.message.clone()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_ranks", "length"), [(1, 5), (2, 8), (3, 7), (4, 2), (3, 9)])
def test_the_mean_is_that_of_all_ranks(num_ranks: int, length: int, dtype: torch.dtype) -> None:
    def program(world: World) -> Tensor:
        bucket, parameter = bucket_of(length, dtype, world)
        reduction = MeanReduction(world)
        fill(bucket, parameter, numbers(world.rank, length, dtype), reduction.scale)
        return reduced(reduction, bucket)

    expected = sum(numbers(rank, length, torch.float64) for rank in range(num_ranks)) / num_ranks
    for found in run_ranks(num_ranks, program, poisons=True):
        torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=500 if dtype is torch.bfloat16 else 0.05)


def test_averages_may_be_those_of_fewer_ranks() -> None:
    def program(world: World) -> float:
        bucket, parameter = bucket_of(1, torch.float32, world)
        reduction = MeanReduction(world)
        reduction.divide_by(2)
        fill(bucket, parameter, torch.ones(1), reduction.scale)
        return reduced(reduction, bucket).item()

    assert run_ranks(4, program) == [2.0] * 4


def shard_gradients(shard: int, length: int, dtype: torch.dtype) -> Tensor | None:
    return None if shard == 2 else numbers(10 + shard, length, dtype)


def run_shards(world: World, num_shards: int, length: int, dtype: torch.dtype) -> Tensor:
    ranges = even_ranges(world.world_size, num_shards)
    bucket, parameter = bucket_of(length, dtype, world)
    partials, tree = Partials(), TreeReduction(world, num_shards)
    tasks = plan_shard_tasks(ranges[world.rank], num_shards)
    tree.expect(partials, [partial_nodes_by_size(shards, num_shards) for shards in ranges])
    for task in tasks[:-1]:
        gradient = shard_gradients(task.shard, length, dtype)
        gradients: Gradients = {} if gradient is None else {parameter: gradient}
        partials.push(gradients, task.num_sums)
    partials.set_aside(tasks[-1].num_sums)
    last = shard_gradients(tasks[-1].shard, length, dtype)
    if last is None:
        bucket.prepare(tree.scale)
    else:
        fill(bucket, parameter, last, tree.scale)
    return reduced(tree, bucket)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_ranks", "num_shards"), [(1, 4), (2, 2), (2, 5), (3, 5), (3, 7), (4, 4)])
def test_the_tree_has_one_sum_on_any_number_of_ranks(num_ranks: int, num_shards: int, dtype: torch.dtype) -> None:
    length = 11

    def program(world: World) -> Tensor:
        return run_shards(world, num_shards, length, dtype)

    absent = torch.zeros(length, dtype=dtype)
    shards = {
        (shard, shard + 1): absent if (found := shard_gradients(shard, length, dtype)) is None else found
        for shard in range(num_shards)
    }
    expected = add_in_tree_order(shards, num_shards, torch.add)
    for found in run_ranks(num_ranks, program, poisons=True):
        assert torch.equal(found, expected)


def test_a_rank_that_expects_nothing_adds_nothing() -> None:
    def program(world: World) -> list[float]:
        bucket, parameter = bucket_of(2, torch.float32, world)
        tree = TreeReduction(world, 5)
        nodes = [partial_nodes_by_size(shards, 5) for shards in even_ranges(2, 5)]
        partials = Partials()
        for _ in nodes[world.rank][1:]:
            partials.push({parameter: torch.ones(2)}, 0)
        tree.expect(partials, nodes)
        if world.rank == 1:
            tree.expect_nothing()
            bucket.prepare(tree.scale)
        else:
            fill(bucket, parameter, torch.ones(2), tree.scale)
        return reduced(tree, bucket).tolist()

    kept = len(partial_nodes_by_size(even_ranges(2, 5)[0], 5))
    assert run_ranks(2, program) == [[float(kept)] * 2] * 2


def test_a_hook_reduces_in_place_of_the_group() -> None:
    def program(world: World) -> list[float]:
        def double(_state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            work = dist.all_reduce(bucket.buffer(), group=world.group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: 2 * future.value()[0])

        bucket, parameter = bucket_of(3, torch.float32, world)
        reduction = HookReduction(CommHook(function=double, state=None), world)
        assert reduction.scale == 1.0
        fill(bucket, parameter, torch.full((3,), world.rank + 1.0), reduction.scale)
        return reduced(reduction, bucket).tolist()

    assert run_ranks(2, program) == [[6.0] * 3] * 2


# -- Which parameters may be added to in place -------------------------------------------------------------------------


FIRST, SECOND, THIRD = (nn.Parameter(torch.zeros(1)) for _ in range(3))


@pytest.mark.parametrize(
    ("adds_once", "is_waiting", "expected"),
    [(True, False, {FIRST}), (False, False, set()), (True, True, set())],
)
def test_what_may_be_added_to_in_place(adds_once: bool, is_waiting: bool, expected: set[nn.Parameter]) -> None:
    partial = {FIRST, SECOND, THIRD}
    chosen = may_accumulate_in_place(
        partial, adds_once=adds_once, is_waiting=is_waiting, sparse={SECOND}, hooked={THIRD}
    )
    assert chosen == expected
