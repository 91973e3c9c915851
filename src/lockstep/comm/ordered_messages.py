"""Ordered all-reduces, several under way: exchange of partials, addition by the owner, gathering of sums.

`lockstep.comm.ordered` explains what is exchanged, and why so.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.messages import wait_all, write_back
from lockstep.comm.ordered_reduction import FlatReduction, PartialLayout, flatten_reduction, is_one_addition
from lockstep.comm.ordered_transports import OrderedTransport, Received, transport_for
from lockstep.comm.segments import Bounds, plan_chunks
from lockstep.comm.world import World
from lockstep.shards.tree import Node, add_in_tree_order

_CHUNK_BYTES = 16 << 20
"""Most that a rank receives in the exchange of one chunk."""
_MAX_IN_FLIGHT = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkInFlight:
    """A chunk whose exchange is on its way."""

    reduction: FlatReduction
    segments: list[Bounds]
    """The segment of every rank."""
    received: Received
    """Other ranks' partials of this rank's segment, when the works are done."""
    works: list[dist.Work]
    transport: OrderedTransport


@final
class OrderedMessages:
    """Ordered all-reduces, one after the other: the next is exchanged while one is added and gathered.

    Every rank starts the same reductions in the same order; nothing is compared. On a GPU they run on a stream of their
    own, beside what the caller computes.
    """

    def __init__(self, world: World, num_shards: int) -> None:
        self._world = world
        self._num_shards = num_shards
        self._in_flight: deque[_ChunkInFlight] = deque()
        self._gathers: list[dist.Work] = []
        self._started: list[tuple[FlatReduction, Tensor]] = []
        self._landing_places: list[Tensor] = []
        self._num_chunks = 0
        self._side: torch.Stream | None = None

    @torch.no_grad()
    def start(self, partials: Mapping[Node, Tensor], out: Tensor, layout: PartialLayout) -> None:
        """Start a reduction (collective); the partials, of which one may be `out`, are left alone until `finish`."""
        with self._beside(out.device):
            reduction = flatten_reduction(partials, out, self._num_shards, layout, self._world)
            self._started.append((reduction, out))
            if is_one_addition(reduction):
                self._gathers.append(_all_reduce(reduction))
                return
            transport = transport_for(out.device)
            num_partials = sum(len(nodes) for nodes in reduction.layout)
            segment_elements = max(2, _CHUNK_BYTES // (num_partials * reduction.out.element_size()))
            for segments in plan_chunks(reduction.out.numel(), self._world.world_size, segment_elements):
                if len(self._in_flight) == _MAX_IN_FLIGHT:
                    self._gathers += _add_and_gather(self._in_flight.popleft())
                received, works = transport.exchange(reduction, segments, partial(self._make_room, out.device))
                self._in_flight.append(
                    _ChunkInFlight(
                        reduction=reduction, segments=segments, received=received, works=works, transport=transport
                    )
                )

    @torch.no_grad()
    def finish(self) -> None:
        """Return when all that was started is in its place; on a GPU the current stream waits for that."""
        if not self._started:
            return
        device = self._started[0][1].device
        with self._beside(device):
            while self._in_flight:
                self._gathers += _add_and_gather(self._in_flight.popleft())
            wait_all(self._gathers)
            for reduction, out in self._started:
                write_back(reduction.out, out)
        self._gathers = []
        if self._side is not None:
            torch.accelerator.current_stream(device).wait_stream(self._side)
        # Only now: memory that is freed while a stream reads it would be given to the next tensor.
        self._started = []

    def _make_room(self, device: torch.device, num_bytes: int) -> Tensor:
        """Return memory that no chunk in flight uses; it is kept, for fresh memory costs a page fault per 4 KiB."""
        number, self._num_chunks = self._num_chunks % _MAX_IN_FLIGHT, self._num_chunks + 1
        if len(self._landing_places) <= number:
            self._landing_places.append(torch.empty(0, dtype=torch.uint8, device=device))
        place = self._landing_places[number]
        if place.numel() < num_bytes or place.device != device:
            place = self._landing_places[number] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return place[:num_bytes]

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Run on a stream of our own, after what the current one has to do by now."""
        if device.type == "cpu":
            yield
            return
        current = torch.accelerator.current_stream(device)
        if self._side is None or self._side.device != current.device:
            self._side = torch.Stream(device)
        self._side.wait_stream(current)
        with self._side:
            yield


def _add_and_gather(finished: _ChunkInFlight) -> list[dist.Work]:
    """Wait for the exchange of a chunk, add this rank's segment, and start gathering the sums into the result.

    Only now may the result be written: it may be a partial that was being sent.
    """
    wait_all(finished.works)
    reduction = finished.reduction
    world, out = reduction.world, reduction.out
    own = slice(*finished.segments[world.rank])
    partials = {node: (landing, True) for node, landing in finished.received.items()}
    in_out = [node for node, held in reduction.partials.items() if held.data_ptr() == out.data_ptr()]
    for node, held in reduction.partials.items():
        # If several partials are one tensor, each sum needs it as it was.
        partials[node] = held[own], in_out == [node]
    total, _ = add_in_tree_order(partials, reduction.num_shards, _add)
    if total.data_ptr() != out[own].data_ptr():
        out[own].copy_(total)
    return finished.transport.gather(reduction, finished.segments)


def _all_reduce(reduction: FlatReduction) -> dist.Work:
    """Start the group's own all-reduce of one partial on each of two ranks. [Note: one addition]."""
    (own,) = reduction.partials.values()
    if own.data_ptr() != reduction.out.data_ptr():
        reduction.out.copy_(own)
    work: dist.Work | None = dist.all_reduce(reduction.out, group=reduction.world.group, async_op=True)
    assert work is not None
    return work


def _add(left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Add two sums, each with whether its memory may be written; that of the caller's partials may not."""
    for target, is_writable in (left, right):
        if is_writable:
            return torch.add(left[0], right[0], out=target), True
    return left[0] + right[0], True
