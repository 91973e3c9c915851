import math
import operator
import random
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.shards import (
    add_in_tree_order,
    completed_nodes,
    derive_seed,
    even_ranges,
    partial_nodes,
    partial_nodes_by_size,
    plan_shard_tasks,
    shard_range,
    split_evenly,
)
from lockstep.shards.assignment import balance_ranges
from lockstep.shards.tree import Node, merged_nodes

MOST_SHARDS = 24


def numbers(num_shards: int) -> list[float]:
    """Return numbers of very different magnitudes, so that another order of addition gives other bits."""
    generator = random.Random(num_shards)
    return [generator.uniform(-1, 1) * 10 ** generator.randint(-8, 8) for _ in range(num_shards)]


def run_shards(values: list[float], start: int, stop: int) -> dict[Node, float]:
    """Add values as a worker does that runs its shards in order and keeps partials on a stack."""
    num_shards = len(values)
    stack: list[tuple[Node, float]] = []
    for shard in range(start, stop):
        leaf, *sums = completed_nodes(shard, start, num_shards)
        stack.append((leaf, values[shard]))
        for node in sums:
            (_, right), (_, left) = stack.pop(), stack.pop()
            stack.append((node, left + right))
        assert [node for node, _ in stack] == partial_nodes(start, shard + 1, num_shards)
    return dict(stack)


def tree_sum(values: list[float], world_size: int) -> float:
    partials: dict[Node, float] = {}
    for rank in range(world_size):
        owned = shard_range(rank, world_size, len(values))
        partials.update(run_shards(values, owned.start, owned.stop))
    return add_in_tree_order(partials, len(values), lambda left, right: left + right)


@pytest.mark.parametrize("num_shards", range(1, MOST_SHARDS + 1))
def test_the_sum_has_the_bits_of_one_worker_on_any_number(num_shards: int) -> None:
    values = numbers(num_shards)
    alone = tree_sum(values, 1)
    assert alone == pytest.approx(math.fsum(values), rel=1e-6, abs=1e-3)
    for world_size in range(1, num_shards + 1):
        assert tree_sum(values, world_size).hex() == alone.hex()


def run_tasks(values: list[float], shards: range) -> tuple[dict[Node, float], int]:
    """Add values in the order of the tasks; return the partials, and the largest number of values held at once."""
    stack: list[float] = []
    most = 0
    for task in plan_shard_tasks(shards, len(values)):
        stack.append(values[task.shard])
        most = max(most, len(stack))
        for _ in range(task.num_sums):
            right, left = stack.pop(), stack.pop()
            stack.append(left + right)
    return dict(zip(partial_nodes_by_size(shards, len(values)), stack, strict=True)), most


@pytest.mark.parametrize("num_shards", range(1, MOST_SHARDS + 1))
def test_shard_tasks_give_the_bits_of_the_tree_and_hold_few_gradients(num_shards: int) -> None:
    values = numbers(num_shards)
    alone = tree_sum(values, 1)
    for world_size in range(1, num_shards + 1):
        partials: dict[Node, float] = {}
        for rank in range(world_size):
            shards = shard_range(rank, world_size, num_shards)
            found, most = run_tasks(values, shards)
            partials.update(found)
            assert most <= math.ceil(math.log2(len(shards))) + 1
        assert add_in_tree_order(partials, num_shards, operator.add).hex() == alone.hex()


def test_the_order_matters_for_these_numbers() -> None:
    # Otherwise the test above could not fail.
    assert any(sum(numbers(count)) != tree_sum(numbers(count), 1) for count in range(3, MOST_SHARDS + 1))


@pytest.mark.parametrize("num_shards", [1, 5, 8, 24, 100])
def test_a_range_has_few_partials_that_cover_it_once(num_shards: int) -> None:
    for start in range(num_shards):
        for stop in range(start + 1, num_shards + 1):
            nodes = partial_nodes(start, stop, num_shards)
            assert [shard for lo, hi in nodes for shard in range(lo, hi)] == list(range(start, stop))
            assert len(nodes) <= max(1, 2 * math.ceil(math.log2(stop - start + 1)))


def test_a_missing_shard_is_an_error() -> None:
    with pytest.raises(ValueError, match="No partial covers shard 2"):
        add_in_tree_order({(0, 2): 1.0}, 4, lambda left, right: left + right)


def test_shards_outside_the_run_are_an_error() -> None:
    with pytest.raises(ValueError, match="not within the 4 shards"):
        partial_nodes(2, 5, 4)


@pytest.mark.usefixtures("no_garbage_collection")
def test_partials_are_freed_at_once() -> None:
    # A reference cycle once kept the partials alive, so every step allocated new memory for its buckets.
    partials = {(shard, shard + 1): torch.ones(1) for shard in range(3)}
    added = weakref.ref(partials[0, 1])
    add_in_tree_order(partials, 3, torch.add)
    del partials
    assert added() is None


# -- Which shards and samples are whose, and seeds ---------------------------------------------------------------------


@given(total=st.integers(0, 500), num_parts=st.integers(1, 40))
def test_parts_cover_everything_once_and_evenly(total: int, num_parts: int) -> None:
    bounds = split_evenly(total, num_parts)
    covered = [index for start, stop in bounds for index in range(start, stop)]
    lengths = [stop - start for start, stop in bounds]
    assert covered == list(range(total))
    assert len(bounds) == num_parts
    assert max(lengths) - min(lengths) <= 1


@given(num_shards=st.integers(1, 24), data=st.data())
def test_every_shard_has_one_worker(num_shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, num_shards))
    ranges = [shard_range(rank, world_size, num_shards) for rank in range(world_size)]
    assert [shard for owned in ranges for shard in owned] == list(range(num_shards))
    assert all(len(owned) >= 1 for owned in ranges)


def test_more_workers_than_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="5 workers cannot share 4 shards"):
        shard_range(0, 5, 4)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="Rank 2 is outside"):
        shard_range(2, 2, 4)


def test_seeds_differ_by_purpose_and_place() -> None:
    seeds = [
        derive_seed("shard", 0, 1, 2),
        derive_seed("shard", 0, 2, 1),
        derive_seed("shard", 0, 12),
        derive_seed("sample", 0, 1, 2),
        derive_seed("shard", 1, 1, 2),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_never_changes() -> None:
    # Every digest and every resumed run depends on this value.
    assert derive_seed("shard", 0, 1, 2) == PINNED


PINNED = 107630018246148545


# -- Ranges of shards that are balanced by the seconds that workers take -----------------------------------------------


def counts(seconds: list[float], num_shards: int, min_gain: float = 0.0) -> list[int]:
    return [len(shards) for shards in balance_ranges(seconds, even_ranges(len(seconds), num_shards), min_gain=min_gain)]


@pytest.mark.parametrize(
    ("seconds", "num_shards", "expected"),
    [
        ([1.0, 1.0], 8, [4, 4]),
        ([1.0, 3.0], 8, [6, 2]),
        ([3.0, 1.0], 8, [2, 6]),
        ([1.0, 100.0], 8, [7, 1]),  # every worker runs at least one shard
        ([1.0, 2.0, 2.0], 8, [4, 2, 2]),
        ([1.0, 3.0], 2, [1, 1]),
    ],
)
def test_the_slowest_worker_finishes_as_early_as_possible(
    seconds: list[float], num_shards: int, expected: list[int]
) -> None:
    assert counts(seconds, num_shards) == expected


@given(seconds=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), more=st.integers(0, 20))
def test_ranges_cover_every_shard_once_and_are_never_slower(seconds: list[float], more: int) -> None:
    before = even_ranges(len(seconds), len(seconds) + more)
    after = balance_ranges(seconds, before, min_gain=0.0)
    assert [shard for shards in after for shard in shards] == list(range(len(seconds) + more))
    assert all(after)

    def slowest(ranges: tuple[range, ...]) -> float:
        return max(len(shards) * time for shards, time in zip(ranges, seconds, strict=True))

    assert slowest(after) <= slowest(before)


def test_a_small_gain_moves_nothing() -> None:
    # 4 shards of 1.0 against 4 of 1.3: moving one shard shortens the step from 5.2 to 5.0.
    assert counts([1.0, 1.3], 8) == [5, 3]
    assert counts([1.0, 1.3], 8, min_gain=0.08) == [4, 4]


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_merged_nodes_are_the_largest_subtrees_that_the_leaves_cover(case: tuple[int, set[int]]) -> None:
    num_shards, shards = case
    found = merged_nodes({(shard, shard + 1) for shard in shards}, num_shards)
    assert [shard for node in found for shard in range(*node)] == sorted(shards)
    assert all(partial_nodes(*node, num_shards) == [node] for node in found)
    joined = [(first[0], second[1]) for first, second in pairwise(found) if first[1] == second[0]]
    assert not [both for both in joined if partial_nodes(*both, num_shards) == [both]]
