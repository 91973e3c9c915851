"""The records of a stream from any place of a run on, read in blocks and shuffled within them.

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
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch

from lockstep.data.contents import slice_number
from lockstep.data.keyed import RandomState
from lockstep.data.stream import OpenPart, Stream
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.shards import derive_seed

_NUM_COMPARED = 64
"""So many records of a block are compared between workers, and when a run is resumed."""
_NUM_TOLD = 10_000
"""Reading over fewer records is not worth a message."""
_PLAIN = (bool, int, float, str, type(None))


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
    """Records that are shuffled together; the rest is computed when asked for: a resumed run reads over many blocks."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a block of a run begins."""

    start: BlockStart
    total: int
    """Records before it: of the epoch; of the run, where an epoch reads on where the one before has ended."""

    def to_mapping(self) -> Mapping[str, Any]:
        """Return it as a checkpoint can store it; empty if the source's own state cannot be stored."""
        return {"total": self.total, **asdict(self.start)} if _is_plain(self.start.state) else {}

    @staticmethod
    def from_mapping(found: Mapping[str, Any]) -> "Place":
        start = BlockStart(**{name: found[name] for name in BlockStart.__dataclass_fields__})
        return Place(start=start, total=found["total"])


@final
class RecordQueue:
    """The records of a run from one of them on; `total` come before the next. An error leaves `is_reading` true."""

    def __init__(self, blocks: Iterator[tuple[int, RecordBlock]], total: int) -> None:
        self.total = total
        self.is_reading = False
        self._blocks = blocks
        self._waiting: deque[Record] = deque()
        self._starts: deque[Place] = deque()
        self._first = total

    def fill(self, count: int) -> int:
        """Read until `count` records wait; return how many do, which are fewer where the stream ends."""
        while len(self._waiting) < count:
            self.is_reading = True
            found = next(self._blocks, None)
            self.is_reading = False
            if found is None:
                break
            total, block = found
            self._starts.append(Place(start=block.start, total=total))
            self._waiting.extend(block.records()[max(self._first - total, 0) :])
        return len(self._waiting)

    def take(self, count: int) -> list[Record]:
        """Return the next records, which wait."""
        self.total += count
        next_record = self._waiting.popleft
        return [next_record() for _ in range(count)]

    def place_of(self, total: int) -> Place | None:
        """Return the block of the record after `total` others, or an earlier one; None if no block was read."""
        return next((each for each in reversed(self._starts) if each.total <= total), None)

    def forget(self, total: int) -> None:
        """Drop the places of blocks that are over before the record after `total` others."""
        while len(self._starts) > 1 and self._starts[1].total <= total:
            self._starts.popleft()


def open_queue(
    stream: Stream, order: BlockOrder, *, first_pass: int, is_endless: bool, total: int, noted: Place | None
) -> RecordQueue:
    """Begin to read where `total` records come before: from `noted`, before or at that record, if there is one."""
    beginning = Place(start=BlockStart(pass_number=first_pass, block=0, place=0), total=0)
    if noted is not None and (stream.read is not None or noted.start.state is not None):
        blocks = _read(stream, order, noted, is_endless=is_endless)
        first = next(blocks, None)
        if first is not None and noted.start.number in {None, first[1].start.number}:
            return RecordQueue(_skip(chain([first], blocks), total, None), total)
        warnings.warn(
            "The state of the stream in the checkpoint leads to other records than before, as that of a shuffle "
            f"buffer without its contents does. The stream is read from its beginning instead, over {total:,} records. "
            "Leave the shuffling to the loader. (LS411)",
            stacklevel=stacklevel_of_user(),
        )
    elif total >= _NUM_TOLD:
        warnings.warn(
            f"The stream is read from its beginning, over {total:,} records that were seen already. That is not "
            "necessary where the stream is a list of parts, ls.Stream(files, read=...), or has state_dict and "
            "load_state_dict, and the loader is saved with the trainer: "
            "trainer.save(path, extra={'loader': loader}). (LS411)",
            stacklevel=stacklevel_of_user(),
        )
    blocks = _read(stream, order, beginning, is_endless=is_endless)
    return RecordQueue(_skip(blocks, total, noted), total)


def _read(stream: Stream, order: BlockOrder, place: Place, *, is_endless: bool) -> Iterator[tuple[int, RecordBlock]]:
    """Yield the blocks from a place on, each with the number of records before it."""
    start, total = place.start, place.total
    while True:
        is_empty = start.place == 0
        for block in read_blocks(stream, order, start):
            yield total, block
            total += len(block)
            is_empty = False
        if not is_endless:
            return
        if is_empty:
            raise ValueError(f"The stream has no records in pass {start.pass_number}, so it does not go on. (LS410)")
        start = BlockStart(pass_number=start.pass_number + 1, block=0, place=0)


def _skip(
    blocks: Iterator[tuple[int, RecordBlock]], total: int, noted: Place | None
) -> Iterator[tuple[int, RecordBlock]]:
    """Drop the blocks before a record; check that they are what they were when a place was noted."""
    for before, block in blocks:
        if noted is not None and before == noted.total and block.start.number != noted.start.number:
            raise ValueError(
                f"The stream has other records now: those from record {block.start.place} on are not what they were "
                "when the checkpoint was written, so samples would come twice, or never. A stream must give the same "
                "records whenever it is read: sort what it lists, and let what it shuffles depend on "
                "set_epoch(epoch). (LS410)"
            )
        if before + len(block) > total:
            yield before, block


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
