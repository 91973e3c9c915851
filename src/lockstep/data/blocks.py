"""The records of a stream, read in blocks and shuffled within them.

A block is read as a whole, and its order is derived from (seed, pass, block). So nothing of the shuffling is kept in a
checkpoint: whoever knows where a block begins can read it.

    stream     r0 r1 r2 r3 r4 | r5 r6 r7 r8 r9 | r10 ...
    samples    r3 r0 r4 r2 r1 | r6 r9 r5 r8 r7 | ...

The first block of a pass is shorter, by another number in each pass, so that neighbours are not always the same.

[Note: random numbers of a stream] What a stream draws while it is read must not depend on where a worker began to read.
A part is opened in a random state that is derived from (seed, pass, part), and goes on in it from block to block;
whoever begins in its middle reads what comes before, in the same state. A source that can go to a place reads nothing
before it: each of its blocks is read in a state of its own.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, final

import torch

from lockstep.data.contents import slice_number
from lockstep.data.keyed import RandomState
from lockstep.data.stream import OpenPart, Stream
from lockstep.shards import derive_seed

_NUM_COMPARED = 64
"""So many records of a block are compared between workers, and when a run is resumed."""


class Record(NamedTuple):
    """One record of a stream; a tuple, because one is made for each."""

    pass_number: int
    place: int
    """How many records of the pass come before it."""
    value: Any

    def __str__(self) -> str:
        return str(self.place)


def make_records(found: Iterable[tuple[int, int, Any]]) -> list[Record]:
    """Return a record for each (pass, place, value): faster than `Record(...)`, which runs in Python."""
    return list(map(partial(tuple.__new__, Record), found))


def values_of(records: Sequence[Record]) -> list[Any]:
    return [record.value for record in records]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStart:
    pass_number: int
    block: int
    """Number of the block in the pass."""
    place: int
    """Records of the pass before it."""
    part: int = 0
    """How many parts come before the one in which it begins, in the order of the pass."""
    offset: int = 0
    """Records of that part before it."""
    number: int | None = None
    """A number for its records; None if it is not known."""
    state: Any = None
    """The source's own state; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Sizes and orders of blocks: a function of (seed, pass, block)."""

    seed: int
    """Of the run."""
    size: int
    """Records of a block."""
    shuffle: bool
    """Whether parts and records come in a random order."""

    def parts(self, number: int, pass_number: int) -> list[int]:
        """Return the order of so many parts in a pass."""
        return self.shuffled(number, derive_seed("parts", self.seed, pass_number))

    def size_of(self, pass_number: int, block: int) -> int:
        """Return how many records a block has, but for the last one of a pass."""
        if block or not self.shuffle:
            return self.size
        half = (self.size + 1) // 2
        return half + derive_seed("first block", self.seed, pass_number) % (self.size - half + 1)

    def place_of(self, pass_number: int, block: int) -> int:
        """Return how many records of the pass come before a block."""
        return self.size_of(pass_number, 0) + (block - 1) * self.size if block else 0

    def block_at(self, pass_number: int, place: int) -> int:
        """Return the block in which a record is."""
        first = self.size_of(pass_number, 0)
        return 0 if place < first else 1 + (place - first) // self.size

    def records(self, number: int, pass_number: int, block: int) -> list[int]:
        """Return the order of so many records of a block."""
        return self.shuffled(number, derive_seed("block", self.seed, pass_number, block))

    def shuffled(self, number: int, seed: int) -> list[int]:
        """Return so many places in a random order, or in order."""
        if not self.shuffle:
            return list(range(number))
        return torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()


@final
class RecordBlock:
    """Records that are shuffled together.

    What follows from them is computed when it is asked for: a run that is resumed reads over many blocks.
    """

    def __init__(self, start: BlockStart, values: Sequence[Any], order: BlockOrder) -> None:
        self._start = start
        self._values = values
        self._order = order

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def start(self) -> BlockStart:
        """Where it begins, with the number for its records."""
        return replace(self._start, number=_number_of(self._values))

    def records(self) -> list[Record]:
        """Return the records, shuffled."""
        number, place, values = self._start.pass_number, self._start.place, self._values
        order = self._order.records(len(values), number, self._start.block)
        return make_records([(number, place + index, values[index]) for index in order])


def read_blocks(stream: Stream, order: BlockOrder, start: BlockStart) -> Iterator[RecordBlock]:
    """Yield the blocks of one pass."""
    reader = PassReader(stream, order.parts(len(stream.parts), start.pass_number), start, order.seed)
    block, place = start.block, start.place
    while True:
        state, (part, offset) = reader.state(), reader.position
        size = order.size_of(start.pass_number, block)
        if stream.limit is not None:
            size = min(size, stream.limit - place)
        values = reader.read(size)
        if not values:
            return
        yield RecordBlock(
            BlockStart(pass_number=start.pass_number, block=block, place=place, part=part, offset=offset, state=state),
            values,
            order,
        )
        block, place = block + 1, place + len(values)


def _number_of(values: Sequence[Any]) -> int:
    """Return a number for records: of the first, the last and some between, since each takes time."""
    some = [values[0], values[-1], *values[:: -(-len(values) // _NUM_COMPARED)]]
    return slice_number([len(values), *some])


@final
class PassReader:
    """Reads the records of one pass over a stream, in order."""

    def __init__(self, stream: Stream, parts: Sequence[int], start: BlockStart, seed: int) -> None:
        self._stream = stream
        self._parts = parts
        self._pass_number = start.pass_number
        self._block = start.block
        self._seed = seed
        self.position = (start.part, start.offset)
        self._open: OpenPart | None = None
        self._random = RandomState(0, None)
        self._state = start.state

    def state(self) -> Any:
        """Return the source's own state; None without one."""
        return self._state if self._open is None else copy.deepcopy(self._open.state())

    def read(self, count: int) -> list[Any]:
        """Return the records of the next block, fewer at the end of the pass."""
        if self._stream.has_state:
            self._random = self._random_state("stream", self._block)
        self._block += 1
        found: list[Any] = []
        while len(found) < count and self.position[0] < len(self._parts):
            place, offset = self.position
            wanted = count - len(found)
            values = self._read_part(self._parts[place], offset, wanted)
            found += values
            if len(values) < wanted:
                self.position, self._open = (place + 1, 0), None
            else:
                self.position = (place, offset + len(values))
        return found

    def _read_part(self, part: int, offset: int, count: int) -> list[Any]:
        """Return the next records of the present part, fewer at its end."""
        length = None if self._stream.lengths is None else self._stream.lengths[part]
        try:
            if self._open is None and not self._stream.has_state:  # [Note: random numbers of a stream]
                self._random = self._random_state("stream part", part)
            with self._random.entered():
                if self._open is None:
                    self._open = self._begin(part, offset)
                values = list(islice(self._open, count))
                if length is not None and len(values) == count and offset + count == length:
                    values += islice(self._open, 1)  # there is none, or the length is wrong
        except Exception as error:
            error.add_note(f"This was after record {offset} of {self._stream.name_part(part)}.")
            raise
        if length is not None and (len(values) > count or (len(values) < count and offset + len(values) != length)):
            more = "more" if offset + len(values) > length else f"only {offset + len(values)}"
            raise ValueError(
                f"lengths says that {self._stream.name_part(part)} has {length} records, and it has {more}. Count the "
                "records of each part again. (LS410)"
            )
        return values

    def _random_state(self, name: str, number: int) -> RandomState:
        seed = derive_seed(name, self._seed, self._pass_number, number)
        return RandomState(seed, (self._stream.parts, self._stream.read))

    def _begin(self, part: int, offset: int) -> OpenPart:
        opened = self._stream.open(part, self._pass_number)
        if self._state is not None:
            opened.load(self._state)
            self._state = None
        else:
            next(islice(opened, offset, offset), None)  # read and drop
        return opened
