"""Ring and ordered reduction on a device, over a group that runs messages in order, as NCCL does without a batch."""

import operator
from collections.abc import Callable
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
from lockstep.shards import add_in_tree_order, completed_nodes, shard_range
from lockstep.shards.tree import Node

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
