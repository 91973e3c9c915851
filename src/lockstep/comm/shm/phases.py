"""Phases: the one way in which the ranks of a group hand each other data.

In a phase every rank writes into its send buffer, waits until all have (`end_phase`), and reads from the others'.
There are two send buffers per rank, used in turn, so one exchange of semaphores per phase is enough:

    rank 0   write A0 | end 0 | read A1, write B0 | end 1 | read B1, write A0 | end 2 | ...
    rank 1   write A1 | end 0 | read A0, write B1 | end 1 | read B0, write A1 | end 2 | ...

A is written again only after phase 1 has ended, and a rank ends phase 1 only when it has read A. The first phase of a
call carries its description, and every rank compares all of them: either all go on or all raise.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.calls import LONGEST_CALL, explain_mismatch
from lockstep.comm.shm.arithmetic import Reduction, Step, reduce_into, reduction, schedule, schedule_nodes
from lockstep.comm.shm.memory import Memory, read_text
from lockstep.comm.shm.peers import Peers
from lockstep.errors import CollectiveMismatchError
from lockstep.processes.user_line import find_user_line
from lockstep.shards.tree import Node

NOWHERE = -1
"""The location of a tensor that is not in the group's memory."""
_TEXT: Final = 8
"""Where the text of a page begins, after the location."""


@final
class PhaseExchange:
    def __init__(self, memory: Memory, peers: Peers) -> None:
        self.rank = peers.rank
        self.size = peers.size
        self.global_ranks = peers.global_ranks
        self.send_buffer_bytes = memory.layout.send_buffer_bytes
        self.memory = memory
        self._peers = peers
        self._parity = 0
        self._call = b""
        self.caller: str | int | None = None
        """Where the call was made: the user's line, or the thread that waits for the call; None for this thread."""
        self._pages = [
            [memory.address + memory.layout.call(rank, parity) for rank in range(peers.size)] for parity in (0, 1)
        ]

    def send_buffer(self, dtype: torch.dtype) -> Tensor:
        """Return what this rank writes before the phase ends, as a flat tensor."""
        return self.memory.send_buffer(self.rank, self._parity, dtype)

    def received(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Return what `rank` wrote in the last phase, as a flat tensor; to be read before this phase ends."""
        return self.memory.send_buffer(rank, 1 - self._parity, dtype)

    def end_phase(self, timeout_seconds: float | None = None) -> None:
        """End a phase (collective), in the time that the group allows or in another."""
        self._peers.end_phase(self._call, timeout_seconds)
        self._parity = 1 - self._parity

    def compare_calls(self, call: bytes, location: int = NOWHERE, timeout_seconds: float | None = None) -> list[int]:
        """End the first phase of a call, in which every rank publishes what it calls (collective).

        Return the location in its heap that each rank gave for the call's tensor. If the calls differ, all ranks raise.
        """
        self._call = call
        pages, page = self._publish(call, location, timeout_seconds)
        locations = [location] * self.size
        for rank, address in enumerate(pages):
            if rank != self.rank:
                other = ctypes.string_at(address, len(page))
                if other[8:] != page[8:]:
                    raise self._explain_mismatch(pages)  # every rank finds a difference, so every rank is here
                locations[rank] = struct.unpack_from("<q", other)[0]
        return locations

    def _publish(self, text: bytes, location: int, timeout_seconds: float | None) -> tuple[list[int], bytes]:
        """End a phase in which every rank publishes a text; return where the texts are, and this rank's page."""
        pages = self._pages[self._parity]
        page = struct.pack("<qi", location, len(text)) + text
        ctypes.memmove(pages[self.rank], page, len(page))
        self.end_phase(timeout_seconds)
        return pages, page

    def _explain_mismatch(self, pages: Sequence[int]) -> CollectiveMismatchError:
        """Exchange the lines of the users' code too, and return the error for different calls (collective)."""
        calls = [read_text(where + _TEXT, LONGEST_CALL) for where in pages]
        line = self.caller if isinstance(self.caller, str) else find_user_line(self.caller)
        places, _ = self._publish(line.encode()[:LONGEST_CALL], NOWHERE, None)
        lines = [read_text(where + _TEXT, LONGEST_CALL).decode(errors="replace") for where in places]
        return explain_mismatch(
            dict(zip(self.global_ranks, calls, strict=True)), dict(zip(self.global_ranks, lines, strict=True))
        )


# The all-reduce: a reduce-scatter and an all-gather in one pipeline of phases.
#
# Ranks hold *parts*, one or several each; the sum of all of them, in tree order, goes into the result on every rank. A
# long tensor is cut into chunks and every chunk into one segment per rank. Phase i of n + 1, for rank r:
#
#     1 write   of its parts of chunk i: the segments that others own; and, from step 4 of the phase before, the reduced
#               segment r of chunk i - 1
#     2 end the phase
#     3 read    the reduced segments of chunk i - 1 from their owners
#     4 reduce  segment r of chunk i, from all ranks' send buffers, into the result and into the next send buffer
#
# A send buffer has room for the segments of one chunk, for each rank one place per part:
#
#     | segment 0 of part 0, of part 1, ... | segment 1 of part 0, of part 1, ... | ...
#                                            ^ rank 1 writes its reduced segment here: no other rank's goes there

_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialReduction:
    """What is reduced, as one rank sees it."""

    parts: Sequence[Tensor]
    """What this rank holds: flat, of one length and dtype."""
    out: Tensor
    """Where the result goes: likewise; may be one of the parts."""
    how: Reduction
    holders: Sequence[tuple[int, int]]
    """For every part of the group, in tree order: its rank, and its number among the parts of that rank."""
    steps: Sequence[Step]
    """The additions, over the parts in that order."""
    num_slots: int
    """Most parts that a rank holds."""


def one_per_rank(exchange: PhaseExchange, tensor: Tensor, how: Reduction) -> PartialReduction:
    """Describe the reduction of one tensor of each rank, in place."""
    return PartialReduction(
        parts=[tensor],
        out=tensor,
        how=how,
        holders=[(rank, 0) for rank in range(exchange.size)],
        steps=schedule(exchange.size),
        num_slots=1,
    )


def several_per_rank(
    parts: Sequence[Tensor], out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int
) -> PartialReduction:
    placed = sorted((node, (rank, slot)) for rank, nodes in enumerate(layout) for slot, node in enumerate(nodes))
    return PartialReduction(
        parts=[part.data for part in parts],
        out=out.data,
        how=reduction(ReduceOp.SUM, out.dtype),
        holders=[holder for _, holder in placed],
        steps=schedule_nodes(tuple(node for node, _ in placed), num_shards),
        num_slots=max(len(nodes) for nodes in layout),
    )


def run_short(exchange: PhaseExchange, reduction: PartialReduction, call: bytes) -> None:
    """Reduce parts that fit a send buffer whole: every rank reads all of them (collective)."""
    out = reduction.out
    length = out.numel()
    mine = exchange.send_buffer(out.dtype)
    for number, part in enumerate(reduction.parts):
        mine[number * length : (number + 1) * length].copy_(part)
    exchange.compare_calls(call)
    found = [
        exchange.received(rank, out.dtype)[number * length : (number + 1) * length]
        for rank, number in reduction.holders
    ]
    reduce_into(out, found, reduction.how, reduction.steps)


def write_chunk(exchange: PhaseExchange, reduction: PartialReduction, number: int) -> None:
    """Do step 1 for a chunk."""
    room = _room_per_part(exchange, reduction)
    mine = exchange.send_buffer(reduction.out.dtype)
    for slot, part in enumerate(reduction.parts):
        for rank, piece in enumerate(_segments(exchange, reduction, part, number)):
            if rank != exchange.rank:
                start = (rank * reduction.num_slots + slot) * room
                mine[start : start + piece.numel()].copy_(piece)


def run_after_first_phase(exchange: PhaseExchange, reduction: PartialReduction) -> None:
    """Do all that comes after the first chunk was written and its phase ended (collective)."""
    num_chunks = -(-reduction.out.numel() // (_room_per_part(exchange, reduction) * exchange.size))
    _reduce_chunk(exchange, reduction, 0)
    for number in range(1, num_chunks + 1):
        write_chunk(exchange, reduction, number)
        exchange.end_phase()
        _read_chunk(exchange, reduction, number - 1)
        _reduce_chunk(exchange, reduction, number)


def share(length: int, num_ranks: int, rank: int, element_bytes: int) -> slice:
    """Return the elements that `rank` owns of `length`: equal shares that begin on a cache line."""
    align = max(_ALIGNMENT // element_bytes, 1)
    size = -(-length // (num_ranks * align)) * align
    return slice(min(rank * size, length), min((rank + 1) * size, length))


def room_per_rank(exchange: PhaseExchange, element_bytes: int, num_slots: int = 1) -> int:
    """Return how many elements of its send buffer a rank has for each rank, or for each of its parts and each rank."""
    align = max(_ALIGNMENT // element_bytes, 1)
    return exchange.send_buffer_bytes // (element_bytes * exchange.size * num_slots) // align * align


def _room_per_part(exchange: PhaseExchange, reduction: PartialReduction) -> int:
    return room_per_rank(exchange, reduction.out.element_size(), reduction.num_slots)


def _read_chunk(exchange: PhaseExchange, reduction: PartialReduction, number: int) -> None:
    room = _room_per_part(exchange, reduction)
    for rank, piece in enumerate(_segments(exchange, reduction, reduction.out, number)):
        if rank != exchange.rank:
            start = rank * reduction.num_slots * room
            piece.copy_(exchange.received(rank, piece.dtype)[start : start + piece.numel()])


def _reduce_chunk(exchange: PhaseExchange, reduction: PartialReduction, number: int) -> None:
    room = _room_per_part(exchange, reduction)
    own = _own_segment(exchange, reduction, reduction.out, number)
    if not own.numel():
        return
    first = exchange.rank * reduction.num_slots * room
    parts = []
    for rank, slot in reduction.holders:
        if rank == exchange.rank:
            parts.append(_own_segment(exchange, reduction, reduction.parts[slot], number))
        else:
            start = first + slot * room
            parts.append(exchange.received(rank, own.dtype)[start : start + own.numel()])
    place = exchange.send_buffer(own.dtype)[first : first + own.numel()]
    reduce_into(own, parts, reduction.how, reduction.steps, copies=[place])


def _segments(exchange: PhaseExchange, reduction: PartialReduction, tensor: Tensor, number: int) -> list[Tensor]:
    chunk = _chunk(exchange, reduction, tensor, number)
    return [chunk[share(chunk.numel(), exchange.size, rank, chunk.element_size())] for rank in range(exchange.size)]


def _own_segment(exchange: PhaseExchange, reduction: PartialReduction, tensor: Tensor, number: int) -> Tensor:
    chunk = _chunk(exchange, reduction, tensor, number)
    return chunk[share(chunk.numel(), exchange.size, exchange.rank, chunk.element_size())]


def _chunk(exchange: PhaseExchange, reduction: PartialReduction, tensor: Tensor, number: int) -> Tensor:
    length = _room_per_part(exchange, reduction) * exchange.size
    return tensor[number * length : (number + 1) * length]
