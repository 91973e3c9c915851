"""The cuts and turns of ring and ordered reduction, played through without a group."""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.threaded_group import ThreadedProcessGroup
from tests.support.threaded_ranks import run_ranks
from torch import Tensor

import lockstep as ls
from lockstep.comm import OrderedReductions, World
from lockstep.comm.calls import LONGEST_CALL
from lockstep.comm.ordered import ordered_all_reduce
from lockstep.comm.segments import (
    Bounds,
    HeldPartials,
    Transfer,
    check_held_partials,
    check_layout,
    plan_chunks,
    plan_ring,
    ring_transfers,
)
from lockstep.shards import add_in_tree_order, completed_nodes, partial_nodes, shard_range
from lockstep.shards.tree import Node

SIZES = [(world_size, length) for world_size in range(1, 6) for length in (world_size, world_size + 1, 17, 40)]
TABLES = pytest.mark.parametrize(("world_size", "length"), SIZES)


def assert_covers(bounds: Sequence[Bounds], length: int, longest: int) -> None:
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(1 <= stop - start <= longest for start, stop in bounds)


def play_ring(values: list[list[int]], chunks: list[list[Bounds]], max_in_flight: int) -> None:
    """Take the turns of all ranks at once; what a turn brings is there only when `max_in_flight` more have begun."""
    world_size = len(values)
    in_flight: deque[list[tuple[Transfer, list[int]]]] = deque()

    def finish() -> None:
        for rank, (transfer, landing) in enumerate(in_flight.popleft()):
            start, stop = transfer.received
            there = values[rank][start:stop] if transfer.is_added else [0] * len(landing)
            values[rank][start:stop] = [a + b for a, b in zip(there, landing, strict=True)]

    for transfers in zip(*(ring_transfers(rank, chunks) for rank in range(world_size)), strict=True):
        if len(in_flight) == max_in_flight:
            finish()
        sent = [values[rank][slice(*transfer.sent)] for rank, transfer in enumerate(transfers)]
        in_flight.append([(transfer, sent[rank - 1]) for rank, transfer in enumerate(transfers)])
    while in_flight:
        finish()


@TABLES
@pytest.mark.parametrize("chunk_elements", [2, 3, 100])
def test_the_turns_of_the_ring_sum_every_element(world_size: int, length: int, chunk_elements: int) -> None:
    chunks = plan_ring(length, world_size, chunk_elements)
    assert_covers(list(chain.from_iterable(chunks)), length, chunk_elements)
    assert len({len(of_slice) for of_slice in chunks}) == 1
    values = [[10**rank * (element + 1) for element in range(length)] for rank in range(world_size)]
    expected = [sum(column) for column in zip(*values, strict=True)]
    play_ring(values, chunks, max_in_flight=min(2, len(chunks[0])))
    assert values == [expected] * world_size


def test_a_turn_too_early_gives_another_sum() -> None:
    # So that the test above can fail: with one chunk per slice, a turn needs what the one before it brought.
    values = [[1, 1, 1] for _ in range(3)]
    play_ring(values, plan_ring(3, 3, 2), max_in_flight=2)
    assert values != [[3, 3, 3]] * 3


@TABLES
@pytest.mark.parametrize("segment_elements", [2, 3, 100])
def test_rounds_cover_a_tensor_without_an_empty_slice(world_size: int, length: int, segment_elements: int) -> None:
    rounds = plan_chunks(length, world_size, segment_elements)
    assert {len(slices) for slices in rounds} == {world_size}
    assert_covers(list(chain.from_iterable(rounds)), length, segment_elements)
    assert max(stop - start for slices in rounds for start, stop in slices) == rounds[0][0][1]


def nodes_of_ranks(world_size: int, num_shards: int) -> list[list[Node]]:
    ranges = [shard_range(rank, world_size, num_shards) for rank in range(world_size)]
    return [partial_nodes(owned.start, owned.stop, num_shards) for owned in ranges]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8, 13])
def test_what_workers_hold_is_a_layout(num_shards: int) -> None:
    for world_size in range(1, num_shards + 1):
        check_layout(nodes_of_ranks(world_size, num_shards), num_shards)
    check_layout([[(shard, shard + 1) for shard in reversed(range(num_shards))], []], num_shards)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ([[(0, 2)], [(2, 3)]], r"No rank holds shard 3 of 4; the ranks hold \[\[\(0, 2\)\], \[\(2, 3\)\]\]"),
        ([[], []], "No rank holds shard 0 of 4"),
        ([[(0, 2)], [(1, 2), (2, 4)]], r"Shard 1 is held twice: by rank 0 in \(0, 2\) and by rank 1 in \(1, 2\)"),
        ([[(0, 4)], [(0, 4)]], r"Shard 0 is held twice: by rank 0 in \(0, 4\) and by rank 1 in \(0, 4\)"),
        ([[(0, 4), (0, 4)]], "Shard 0 is held twice: by rank 0 .* and by rank 0"),
        ([[(0, 1)], [(1, 3), (3, 4)]], r"Rank 1 holds \(1, 3\), which is not a subtree of 4 shards"),
        ([[(0, 4)], [(4, 5)]], r"Rank 1 holds \(4, 5\), which is not"),
        ([[(0, 4), (2, 2)]], r"Rank 0 holds \(2, 2\), which is not"),
        ([[(0, 2)], [2, 3]], "Rank 1 holds 2, which is not"),
        ([[[0, 2]], [[2, 4]]], r"Rank 0 holds \[0, 2\], which is not"),
    ],
)
def test_what_is_wrong_with_a_layout_is_named(layout: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_layout(layout, 4)


def test_no_shards_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_shards is 0"):
        check_layout([[]], 0)


def holding(
    node: Node = (0, 1), num_shards: int = 2, shape: tuple[int, ...] = (3,), dtype: str = "float32"
) -> HeldPartials:
    return HeldPartials(nodes=(node,), num_shards=num_shards, shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_shards": 3}, "Rank 1 has num_shards 3, rank 0 has 2"),
        ({"shape": (3, 1)}, r"Rank 1 has shape \(3, 1\), rank 0 has \(3,\)"),
        ({"dtype": "float64"}, "Rank 1 has dtype float64, rank 0 has float32"),
        ({"node": (0, 1)}, "Shard 0 is held twice"),
    ],
)
def test_ranks_that_bring_different_things_are_an_error(change: dict[str, Any], said: str) -> None:
    other: Callable[..., HeldPartials] = holding
    check_held_partials([holding(), other(node=(1, 2))])
    with pytest.raises(ValueError, match=said):
        check_held_partials([holding(), other(**{"node": (1, 2), **change})])


# -- Ring and ordered reduction on a device, over a group that runs messages in order, as NCCL does without a batch ----


SHARDS = 7
Program = Callable[[World], Any]


@pytest.fixture
def messages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = ThreadedProcessGroup.recv

    def receive_at_once(self: ThreadedProcessGroup, *arguments: Any) -> Any:
        work = receive(self, *arguments)
        if arguments[0][0].numel() != LONGEST_CALL:  # descriptions of calls are compared on the CPU
            work.wait()
        return work

    monkeypatch.setattr(ThreadedProcessGroup, "recv", receive_at_once)


def values_of(shard: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(shard)
    return (torch.randn(length, generator=generator) * 10.0**shard).to(dtype)


def partials_of(world: World, length: int, dtype: torch.dtype) -> dict[Node, Tensor]:
    """Return the sums that a rank holds, added as a worker does that runs its shards in order."""
    held: list[tuple[Node, Tensor]] = []
    shards = shard_range(world.rank, world.world_size, SHARDS)
    for shard in shards:
        leaf, *sums = completed_nodes(shard, shards.start, SHARDS)
        held.append((leaf, values_of(shard, length, dtype)))
        for node in sums:
            (_, right), (_, left) = held.pop(), held.pop()
            held.append((node, left + right))
    return dict(held)


def whole_sum(length: int, dtype: torch.dtype) -> Tensor:
    return add_in_tree_order(
        {(shard, shard + 1): values_of(shard, length, dtype) for shard in range(SHARDS)}, SHARDS, operator.add
    )


@pytest.mark.usefixtures("messages_in_order")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ring_needs_no_order_of_messages(world_size: int) -> None:
    # Every rank waited for its neighbour's message before it sent its own.
    def program(world: World) -> list[float]:
        with asynchronous_device() as device:
            tensor = torch.arange(1000.0).to(device.name) * (world.rank + 1)
            return ls.ring_all_reduce(tensor).tolist()

    total = world_size * (world_size + 1) / 2
    expected = (torch.arange(1000.0) * total).tolist()
    assert run_ranks(world_size, program, poisons=True, has_default_group=True) == [expected] * world_size


@pytest.mark.usefixtures("messages_in_order")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 12, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_of_any_number_are_added_in_tree_order(world_size: int, length: int, dtype: torch.dtype) -> None:
    expected = whole_sum(length, dtype)

    def program(world: World) -> bool:
        with asynchronous_device() as device:
            partials = {node: value.to(device.name) for node, value in partials_of(world, length, dtype).items()}
            return torch.equal(ordered_all_reduce(partials, num_shards=SHARDS).cpu(), expected)

    assert run_ranks(world_size, program, poisons=True, has_default_group=True) == [True] * world_size


@pytest.mark.usefixtures("messages_in_order")
def test_several_reductions_are_under_way() -> None:
    def program(world: World) -> list[bool]:
        with asynchronous_device() as device:
            reductions = OrderedReductions(world, 2)
            layout = [[(0, 1)], [(1, 2)]]
            finishes, found = [], []
            for length in (1, 5, 1000):
                for dtype in (torch.float32, torch.bfloat16):
                    mine = values_of(world.rank, length, dtype).to(device.name)
                    out = torch.empty_like(mine) if length == 5 else mine
                    finishes.append(reductions.start({(world.rank, world.rank + 1): mine}, out, layout, waits=False))
                    found.append((out, values_of(0, length, dtype) + values_of(1, length, dtype)))
            for finish in finishes:
                finish()
            return [torch.equal(out.cpu(), expected) for out, expected in found]

    assert run_ranks(2, program, poisons=True) == [[True] * 6] * 2
