"""What a collective copies, adds and waits for, as a program for `native/shm.c`. Pure: numbers in, rows out.

A program is an array of 64-bit numbers, one row after another; the C file lists what a row may be. A row names memory
by its *place*: a base and an offset. Bases are the send buffers of the ranks, as this phase writes them and as the last
one has left them, and the tensors that a call gives. So a program depends on lengths and ranks only, and is kept.

The all-reduce is a reduce-scatter and an all-gather in one pipeline of phases. Ranks hold *parts*, one or several each;
the sum of all of them, in tree order, goes into the result on every rank. A long tensor is cut into chunks and every
chunk into one segment per rank. Phase i of n + 1, for rank r:

    1 write   of its parts of chunk i: the segments that others own; and, from step 4 of the phase before, the reduced
              segment r of chunk i - 1
    2 end the phase
    3 read    the reduced segments of chunk i - 1 from their owners
    4 reduce  segment r of chunk i, from all ranks' send buffers, into the result and into the next send buffer

A send buffer has room for the segments of one chunk, for each rank one place per part:

    | segment 0 of part 0, of part 1, ... | segment 1 of part 0, of part 1, ... | ...
                                           ^ rank 1 writes its reduced segment here: no other rank's goes there
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, final

from lockstep.comm.shm.arithmetic import Step, count_scratch, schedule

END, COPY, CALL, PHASE, PLACES, REDUCE = range(6)
PLACE_BITS: Final = 44
SHORT_BYTES: Final = 2 << 20
"""Up to here, over all ranks, every rank reduces the whole message by itself: one phase fewer, more arithmetic."""
_CHUNK_BYTES: Final = 1 << 20
"""What a rank writes in one phase of a long reduction: what another rank reads next is in a cache still."""
_MOST_CHUNKS: Final = 64
"""How much of a long reduction one program does."""
_ALIGNMENT: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of a group, as far as programs depend on it."""

    size: int
    rank: int
    buffer_bytes: int
    """Bytes of a send buffer."""

    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def sent(self, offset: int = 0) -> int:
        """Return a place in what this rank writes before the phase ends."""
        return self.rank << PLACE_BITS | offset

    def received(self, rank: int, offset: int = 0) -> int:
        """Return a place in what `rank` wrote in the last phase, to be read before this one ends."""
        return self.size + rank << PLACE_BITS | offset

    def given(self, number: int, offset: int = 0) -> int:
        """Return a place in a tensor of the call."""
        return 2 * self.size + number << PLACE_BITS | offset

    def room(self, element_bytes: int, num_slots: int = 1, buffer_bytes: int = 0) -> int:
        """Return how many bytes of its send buffer a rank has for each rank, or for each of its parts and each rank."""
        align = max(_ALIGNMENT, element_bytes)
        return (buffer_bytes or self.buffer_bytes) // (self.size * num_slots) // align * align


class Program(NamedTuple):
    rows: "array[int]"
    address: int
    num_scratch: int
    """How many blocks of scratch memory its reductions need."""


@final
class _ProgramRows:
    """Rows of a program, as they are added."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._num_scratch = 0

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        if num_bytes:
            self._rows.extend((COPY, target, source, num_bytes))

    def end_phase(self, *, is_first: bool = False) -> None:
        """End a phase; in the first of a call the ranks compare what they call."""
        self._rows.append(CALL if is_first else PHASE)

    def find_places(self) -> None:
        """Return to the caller if a rank has published a location."""
        self._rows.append(PLACES)

    def reduce(  # the columns of the row
        self, kind: int, count: int, out: int, parts: Sequence[int], steps: Sequence[Step], copies: Sequence[int] = ()
    ) -> None:
        if count:
            numbers = [number for step in steps for number in (step.left, step.right, step.target)]
            row = [kind, count, len(parts), len(steps), len(copies), out, *parts, *numbers, *copies]
            self._rows.extend((REDUCE, len(row) + 2, *row))
            self._num_scratch = max(self._num_scratch, count_scratch(steps, len(parts)))

    def end(self) -> Program:
        self._rows.append(END)
        return Program(self._rows, self._rows.buffer_info()[0], self._num_scratch)


class ReduceRow(NamedTuple):
    """A reduction that torch makes, as read from a program."""

    row_length: int
    num_elements: int
    out: int
    parts: list[int]
    steps: list[Step]
    copies: list[int]


def read_reduction(program: Program, at: int) -> ReduceRow:
    _, length, _, count, num_parts, num_steps, num_copies, out = program.rows[at : at + 8]
    rest = program.rows[at + 8 : at + length].tolist()
    numbers = rest[num_parts : num_parts + 3 * num_steps]
    steps = [Step(*numbers[first : first + 3]) for first in range(0, len(numbers), 3)]
    return ReduceRow(length, count, out, rest[:num_parts], steps, rest[len(rest) - num_copies :] if num_copies else [])


@lru_cache(maxsize=1)
def barrier() -> Program:
    """Compare the calls, and exchange nothing."""
    rows = _ProgramRows()
    rows.end_phase(is_first=True)
    return rows.end()


# -- All-reduce --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParts:
    """What is reduced: given 0 is the result, given 1 and so on are the parts of this rank."""

    kind: int
    """How elements are added, or `BY_TORCH`."""
    element_bytes: int
    holders: tuple[tuple[int, int], ...]
    """For every part of the group, in tree order: its rank, and its number among the parts of that rank."""
    steps: tuple[Step, ...]
    """The additions, over the parts in that order."""
    num_slots: int = 1
    """Most parts that a rank holds."""

    def count_of(self, rank: int) -> int:
        return sum(holder == rank for holder, _ in self.holders)


@lru_cache(maxsize=256)
def one_part_each(size: int, kind: int, element_bytes: int) -> HeldParts:
    return HeldParts(
        kind=kind,
        element_bytes=element_bytes,
        holders=tuple((rank, 0) for rank in range(size)),
        steps=schedule(size),
    )


def is_short(ranks: Ranks, parts: HeldParts, count: int) -> bool:
    return parts.num_slots * count * parts.element_bytes * ranks.size <= min(SHORT_BYTES, ranks.buffer_bytes)


@lru_cache(maxsize=256)
def reduce_short(ranks: Ranks, parts: HeldParts, count: int) -> Program:
    """Reduce parts that fit a send buffer whole: every rank reads all of them."""
    rows, num_bytes = _ProgramRows(), count * parts.element_bytes
    for slot in range(parts.count_of(ranks.rank)):
        rows.copy(ranks.sent(slot * num_bytes), ranks.given(1 + slot), num_bytes)
    rows.end_phase(is_first=True)
    found = [ranks.received(rank, slot * num_bytes) for rank, slot in parts.holders]
    rows.reduce(parts.kind, count, ranks.given(0), found, parts.steps)
    return rows.end()


def cut(ranks: Ranks, parts: HeldParts, count: int) -> Iterator[tuple[int, int]]:
    """Yield the first element and the number of elements for each program of a long reduction."""
    most = _MOST_CHUNKS * _chunk(ranks, parts)
    for start in range(0, count, most):
        yield start, min(most, count - start)


@lru_cache(maxsize=64)
def reduce_long(
    ranks: Ranks, parts: HeldParts, count: int, *, lies_in_group: bool = False, is_compared: bool = False
) -> Program:
    """Reduce parts in the pipeline, or return to the caller if the tensor of a rank lies in the group's memory.

    A rank of which it does writes nothing before that. Where the calls were compared that is known, and all write.
    """
    rows = _ProgramRows()
    if not lies_in_group:
        _write(rows, ranks, parts, count, 0)
    rows.end_phase(is_first=not is_compared)
    if not is_compared:
        rows.find_places()
    num_chunks = -(-count // _chunk(ranks, parts))
    _reduce(rows, ranks, parts, count, 0)
    for number in range(1, num_chunks + 1):
        _write(rows, ranks, parts, count, number)
        rows.end_phase()
        for rank in ranks.others():  # step 3
            start, num_bytes = _segment(ranks, parts, count, number - 1, rank)
            source = ranks.received(rank, rank * parts.num_slots * _room(ranks, parts))
            rows.copy(ranks.given(0, start), source, num_bytes)
        _reduce(rows, ranks, parts, count, number)
    return rows.end()


@lru_cache(maxsize=64)
def reduce_in_place(ranks: Ranks, parts: HeldParts, count: int) -> Program:
    """Reduce tensors that every rank can see where they are, given r that of rank r, after the calls were compared.

    Each rank reduces its segment and writes it to all.
    """
    rows = _ProgramRows()
    first, last = _share(count, ranks.size, ranks.rank, parts.element_bytes)
    everyone = [ranks.given(rank, first * parts.element_bytes) for rank in range(ranks.size)]
    others = [everyone[rank] for rank in ranks.others()]
    found = [everyone[rank] for rank, _ in parts.holders]
    rows.reduce(parts.kind, last - first, everyone[ranks.rank], found, parts.steps, others)
    rows.end_phase()
    return rows.end()


def _chunk(ranks: Ranks, parts: HeldParts) -> int:
    """Return how many elements a chunk has."""
    return _room(ranks, parts) * ranks.size // parts.element_bytes


def _room(ranks: Ranks, parts: HeldParts) -> int:
    return ranks.room(parts.element_bytes, parts.num_slots, min(_CHUNK_BYTES * parts.num_slots, ranks.buffer_bytes))


def _write(rows: _ProgramRows, ranks: Ranks, parts: HeldParts, count: int, number: int) -> None:
    """Do step 1 for a chunk."""
    for slot in range(parts.count_of(ranks.rank)):
        for rank in ranks.others():
            start, num_bytes = _segment(ranks, parts, count, number, rank)
            place = (rank * parts.num_slots + slot) * _room(ranks, parts)
            rows.copy(ranks.sent(place), ranks.given(1 + slot, start), num_bytes)


def _reduce(rows: _ProgramRows, ranks: Ranks, parts: HeldParts, count: int, number: int) -> None:
    """Do step 4 for a chunk."""
    start, num_bytes = _segment(ranks, parts, count, number, ranks.rank)
    first = ranks.rank * parts.num_slots * _room(ranks, parts)
    found = [
        ranks.given(1 + slot, start) if rank == ranks.rank else ranks.received(rank, first + slot * _room(ranks, parts))
        for rank, slot in parts.holders
    ]
    rows.reduce(
        parts.kind, num_bytes // parts.element_bytes, ranks.given(0, start), found, parts.steps, [ranks.sent(first)]
    )


def _segment(ranks: Ranks, parts: HeldParts, count: int, number: int, rank: int) -> tuple[int, int]:
    """Return where in the tensor the segment of chunk `number` that `rank` owns begins, and its length, in bytes."""
    begin = number * _chunk(ranks, parts)
    length = min(max(count - begin, 0), _chunk(ranks, parts))
    first, last = _share(length, ranks.size, rank, parts.element_bytes)
    return (begin + first) * parts.element_bytes, (last - first) * parts.element_bytes


def _share(length: int, num_ranks: int, rank: int, element_bytes: int) -> tuple[int, int]:
    """Return the elements that `rank` owns of `length`: equal shares that begin on a cache line."""
    align = max(_ALIGNMENT // element_bytes, 1)
    size = -(-length // (num_ranks * align)) * align
    return min(rank * size, length), min((rank + 1) * size, length)


# -- The other collectives ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def reduce_to(ranks: Ranks, parts: HeldParts, count: int, root: int) -> Program:
    """Replace given 0 on the root by the reduction over all ranks."""
    rows = _ProgramRows()
    for start, length, is_first in _pieces(count, ranks.room(parts.element_bytes) * ranks.size // parts.element_bytes):
        own = ranks.given(0, start * parts.element_bytes)
        if ranks.rank != root:
            rows.copy(ranks.sent(), own, length * parts.element_bytes)
        rows.end_phase(is_first=is_first)
        if ranks.rank == root:
            found = [own if rank == root else ranks.received(rank) for rank in range(ranks.size)]
            rows.reduce(parts.kind, length, own, found, parts.steps)
    return rows.end()


@lru_cache(maxsize=64)
def reduce_scatter(ranks: Ranks, parts: HeldParts, count: int) -> Program:
    """Reduce given 1 + r of all ranks into given 0 of rank r, of so many elements each."""
    rows, room = _ProgramRows(), ranks.room(parts.element_bytes)
    for start, length, is_first in _pieces(count, room // parts.element_bytes):
        place = start * parts.element_bytes
        for rank in ranks.others():
            rows.copy(ranks.sent(rank * room), ranks.given(1 + rank, place), length * parts.element_bytes)
        rows.end_phase(is_first=is_first)
        found = [
            ranks.given(1 + rank, place) if rank == ranks.rank else ranks.received(rank, ranks.rank * room)
            for rank in range(ranks.size)
        ]
        rows.reduce(parts.kind, length, ranks.given(0, place), found, parts.steps)
    return rows.end()


@lru_cache(maxsize=64)
def broadcast(ranks: Ranks, num_bytes: int, root: int) -> Program:
    """Replace given 0 by the root's."""
    rows = _ProgramRows()
    for start, length, is_first in _pieces(num_bytes, ranks.buffer_bytes):
        if ranks.rank == root:
            rows.copy(ranks.sent(), ranks.given(0, start), length)
        rows.end_phase(is_first=is_first)
        if ranks.rank != root:
            rows.copy(ranks.given(0, start), ranks.received(root), length)
    return rows.end()


@lru_cache(maxsize=64)
def gather(ranks: Ranks, num_bytes: int, *, takes: bool) -> Program:
    """Collect given 0 of rank r in given 1 + r, on the ranks that take it."""
    rows = _ProgramRows()
    for start, length, is_first in _pieces(num_bytes, ranks.buffer_bytes):
        rows.copy(ranks.sent(), ranks.given(0, start), length)
        rows.end_phase(is_first=is_first)
        for rank in range(ranks.size if takes else 0):
            rows.copy(ranks.given(1 + rank, start), ranks.received(rank), length)
    return rows.end()


@lru_cache(maxsize=64)
def scatter(ranks: Ranks, num_bytes: int, root: int) -> Program:
    """Put given 1 + r of the root into given 0 of rank r."""
    rows, room = _ProgramRows(), ranks.room(1)
    for start, length, is_first in _pieces(num_bytes, room):
        if ranks.rank == root:
            for rank in range(ranks.size):
                rows.copy(ranks.sent(rank * room), ranks.given(1 + rank, start), length)
        rows.end_phase(is_first=is_first)
        rows.copy(ranks.given(0, start), ranks.received(root, ranks.rank * room), length)
    return rows.end()


def all_to_all(ranks: Ranks, sent: Sequence[int], received: Sequence[int], longest: int) -> Program:
    """Put given q of rank r into given size + r of rank q, after the calls were compared; lengths in bytes."""
    rows, room = _ProgramRows(), ranks.room(1)
    rows.copy(ranks.given(ranks.size + ranks.rank), ranks.given(ranks.rank), sent[ranks.rank])
    for start in range(0, longest, room):
        for rank in ranks.others():
            length = min(max(sent[rank] - start, 0), room)
            rows.copy(ranks.sent(rank * room), ranks.given(rank, start), length)
        rows.end_phase()
        for rank in ranks.others():
            length = min(max(received[rank] - start, 0), room)
            rows.copy(ranks.given(ranks.size + rank, start), ranks.received(rank, ranks.rank * room), length)
    return rows.end()


def _pieces(length: int, most: int) -> Iterator[tuple[int, int, bool]]:
    """Yield start, length and whether it is the first, for each piece; one empty piece of nothing."""
    for start in range(0, max(length, 1), most):
        yield start, min(most, length - start), start == 0
