"""How partials reach the owners of segments, and the sums all ranks: by messages on CPUs, by collectives elsewhere.

On CPUs every pair of ranks exchanges messages, which over Gloo take less time than all-to-all and all-gather.
For other devices both steps are collectives: Gloo has no messages for them; NCCL runs messages one after another unless
they are in one batch, which torch makes only for groups of its own class; and one collective replaces many messages.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.messages import gather_single, post_messages
from lockstep.comm.ordered_reduction import FlatReduction
from lockstep.comm.segments import Bounds
from lockstep.comm.world import World
from lockstep.shards.tree import Node

_ALIGNMENT_BYTES = 64

Received = dict[Node, Tensor]
"""Partials of this rank's segment, in memory that the addition may overwrite."""
MakeRoom = Callable[[int], Tensor]
"""Returns so many bytes, on the device of the reduction, that no other exchange uses."""


class OrderedTransport(Protocol):
    """Moves what an ordered reduction exchanges."""

    def exchange(
        self, reduction: FlatReduction, segments: Sequence[Bounds], make_room: MakeRoom
    ) -> tuple[Received, list[dist.Work]]:
        """Start sending the owners of segments this rank's partials of them (collective); return where others' land."""

    def gather(self, reduction: FlatReduction, segments: Sequence[Bounds]) -> list[dist.Work]:
        """Start sending this rank's segment of the result to all, and receiving the others' (collective)."""


@final
class MessageTransport:
    """Messages between every pair of ranks."""

    def exchange(
        self, reduction: FlatReduction, segments: Sequence[Bounds], make_room: MakeRoom
    ) -> tuple[Received, list[dist.Work]]:
        """Send each partial's segments to their owners; see `OrderedTransport`."""
        world = reduction.world
        start, stop = segments[world.rank]
        num_bytes = (stop - start) * reduction.out.element_size()
        stride = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        foreign = [node for nodes in reduction.layout for node in nodes if node not in reduction.partials]
        room = make_room(max(len(foreign) * stride, 1))
        received = {
            node: room[index * stride : index * stride + num_bytes].view(reduction.out.dtype)
            for index, node in enumerate(foreign)
        }
        works = post_messages(
            sends=[
                (peer, reduction.partials[node][slice(*segments[peer])])
                for peer in _peers(world)
                for node in reduction.layout[world.rank]
            ],
            receives=[(peer, received[node]) for peer in _peers(world) for node in reduction.layout[peer]],
            world=world,
        )
        return received, works

    def gather(self, reduction: FlatReduction, segments: Sequence[Bounds]) -> list[dist.Work]:
        """Send this rank's segment to each other rank; see `OrderedTransport`."""
        world, out = reduction.world, reduction.out
        own = out[slice(*segments[world.rank])]
        return post_messages(
            sends=[(peer, own) for peer in _peers(world)],
            receives=[(peer, out[slice(*segments[peer])]) for peer in _peers(world)],
            world=world,
        )


@final
class CollectiveTransport:
    """An all-to-all for the first partial of every rank, one for the second, ..., and an all-gather of the sums."""

    def exchange(
        self, reduction: FlatReduction, segments: Sequence[Bounds], make_room: MakeRoom
    ) -> tuple[Received, list[dist.Work]]:
        """Send each partial's segments to their owners; see `OrderedTransport`."""
        world, out = reduction.world, reduction.out
        chunk = slice(segments[0][0], segments[-1][1])
        lengths = _byte_lengths(segments, out)
        own = reduction.layout[world.rank]
        num_partials = sum(len(nodes) for nodes in reduction.layout)
        room = make_room(max(num_partials * lengths[world.rank], 1))
        received: Received = {}
        works: list[dist.Work] = []
        for slot in range(max(len(nodes) for nodes in reduction.layout)):
            # This rank receives its own partial too: a contiguous input has no gap for it.
            senders = [peer for peer, nodes in enumerate(reduction.layout) if slot < len(nodes)]
            first = len(received) * lengths[world.rank]
            for number, peer in enumerate(senders):
                start = first + number * lengths[world.rank]
                place = room[start : start + lengths[world.rank]]
                received[reduction.layout[peer][slot]] = place.view(out.dtype)
            target = room[first : first + len(senders) * lengths[world.rank]]
            source = _as_bytes(reduction.partials[own[slot]][chunk]) if slot < len(own) else target[:0]
            works += _all_to_all(
                target,
                source,
                [lengths[world.rank] if peer in senders else 0 for peer in range(world.world_size)],
                lengths if slot < len(own) else [0] * world.world_size,
                world,
            )
        return received, works

    def gather(self, reduction: FlatReduction, segments: Sequence[Bounds]) -> list[dist.Work]:
        """Gather the segments in place; see `OrderedTransport`."""
        world, out = reduction.world, reduction.out
        lengths = _byte_lengths(segments, out)
        whole = _as_bytes(out[segments[0][0] : segments[-1][1]])
        own = _as_bytes(out[slice(*segments[world.rank])])
        if len(set(lengths)) == 1:
            return gather_single(whole, own, world)
        return _all_to_all(whole, own.repeat(world.world_size), lengths, [own.numel()] * world.world_size, world)


def transport_for(device: torch.device) -> OrderedTransport:
    return MessageTransport() if device.type == "cpu" else CollectiveTransport()


def _all_to_all(
    target: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int], world: World
) -> list[dist.Work]:
    work = dist.all_to_all_single(target, source, list(received), list(sent), group=world.group, async_op=True)
    return [] if work is None else [work]


def _byte_lengths(segments: Sequence[Bounds], out: Tensor) -> list[int]:
    return [(stop - start) * out.element_size() for start, stop in segments]


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a flat contiguous tensor as bytes, so that every dtype travels."""
    return tensor.view(torch.uint8)


def _peers(world: World) -> list[int]:
    """Return the other ranks, the next one first: so no two ranks begin with the same."""
    return [(world.rank + distance) % world.world_size for distance in range(1, world.world_size)]
