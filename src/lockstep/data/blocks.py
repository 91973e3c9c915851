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
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import Any, final

import torch

from lockstep.data.contents import records_number
from lockstep.data.keyed import OwnGenerators, RandomState, SliceKeys
from lockstep.data.stream import OpenPart, Stream
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.shards import derive_seed

_NUM_COMPARED = 64
"""So many records of a block are compared between workers, and when a run is resumed."""
_NUM_TOLD = 10_000
"""Reading over fewer records is not worth a message."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStart:
    total: int
    """Records before it: of the epoch or share; of the run, where an epoch reads on where the one before has ended."""
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

    def to_mapping(self) -> Mapping[str, Any]:
        """Return it as a checkpoint can store it; empty if the source's own state cannot be stored."""
        return asdict(self) if _is_plain(self.state) else {}

    @staticmethod
    def from_mapping(found: Mapping[str, Any]) -> "BlockStart":
        return BlockStart(**{name: found[name] for name in BlockStart.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Sizes and orders of blocks: a function of (seed, pass, block)."""

    seed: int
    size: int
    shuffle: bool

    def parts(self, number: int, pass_number: int) -> Sequence[int]:
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

    def shuffled(self, number: int, seed: int) -> Sequence[int]:
        if not self.shuffle:
            return range(number)
        return torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()


@final
class RecordBlock:
    """Records that are shuffled together; the rest is computed when asked for: a resumed run reads over many blocks.

    `place_of` gives the place of a record in the stream, if that is not its place in the pass.
    """

    def __init__(
        self,
        start: BlockStart,
        records: list[Any],
        order: BlockOrder,
        seed: int,
        place_of: Callable[[int], int] | None = None,
    ) -> None:
        self._start = start
        self._records = records
        self._order = order
        self._seed = seed
        self._place_of = place_of
        self.total = start.total
        self.stop = start.total + len(records)

    @cached_property
    def start(self) -> BlockStart:
        return replace(self._start, number=_number_of(self._records))

    @cached_property
    def _indices(self) -> Sequence[int]:
        return self._order.shuffled(len(self._records), self._seed)

    @cached_property
    def values(self) -> list[Any]:
        """The records in the shuffled order."""
        return list(map(self._records.__getitem__, self._indices)) if self._order.shuffle else self._records

    def sources(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the pass of some records of the shuffled order, and where they are in the stream."""
        number = self._start.pass_number
        places = (self._start.place + index for index in self._indices[first:last])
        return [(number, place) for place in (places if self._place_of is None else map(self._place_of, places))]


Pieces = list[tuple[RecordBlock, int, int]]
"""Which records of the shuffled order of blocks: from a first one up to another."""
_stop_of = attrgetter("stop")


@final
class RecordLine:
    """Records in the order of the training: read in blocks when they are needed, and kept until they are dropped.

    `open_at` yields the blocks from that one on in which a record is.
    """

    def __init__(self, open_at: Callable[[int], Iterator[RecordBlock]]) -> None:
        self._open_at = open_at
        self._blocks: list[RecordBlock] = []
        self._end = 0
        self._reader: Iterator[RecordBlock] | None = None
        self._reading = threading.RLock()  # a thread of the user's may fetch batches that another one cuts anew

    def goes_on_at(self, start: int) -> bool:
        """Whether the record after `start` others is kept, or the next to be read."""
        first = self._blocks[0].total if self._blocks else self._end
        return self._reader is not None and first <= start <= self._end

    def read(self, start: int, stop: int) -> int:
        """Read the records from `start` to `stop`; return where what was read ends: sooner if the stream does."""
        with self._reading:
            if not self.goes_on_at(start):
                self._blocks = []
                self._reader, self._end = self._open_at(start), start
            while self._end < stop:
                assert self._reader is not None
                reader, self._reader = self._reader, None  # opened anew after an error
                found = next(reader, None)
                self._reader = reader
                if found is None:
                    break
                self._blocks.append(found)
                self._end = found.stop
            return self._end

    def pieces(self, start: int, stop: int) -> Pieces:
        found: Pieces = []
        with self._reading:
            self.read(start, stop)
            for index in range(bisect_right(self._blocks, start, key=_stop_of), len(self._blocks)):
                block = self._blocks[index]
                if block.total >= stop:
                    break
                found.append((block, max(start - block.total, 0), min(stop, block.stop) - block.total))
        return found

    def drop(self, start: int) -> None:
        """Keep no block that is over before the record after `start` others."""
        with self._reading:
            if self._blocks and self._blocks[0].stop <= start:
                del self._blocks[: bisect_right(self._blocks, start, key=_stop_of)]


@final
@dataclass(slots=True)
class RecordRun:
    """Records of a line that follow each other, read when they are needed.

    It keeps what it has read, so a batch that was fetched ahead can be cut anew, whatever the line has dropped.
    """

    line: RecordLine | None
    """None in a loading process, which is sent the rest."""
    start: int
    stop: int
    pieces: Pieces = field(default_factory=list)
    values: list[Any] | None = None
    sources: list[tuple[int, int]] | None = None

    def read(self) -> list[Any]:
        if self.values is None:
            assert self.line is not None
            self.pieces = self.line.pieces(self.start, self.stop)
            self.values = []
            for block, first, last in self.pieces:
                self.values += block.values[first:last]
        return self.values

    def find_sources(self) -> list[tuple[int, int]]:
        """Return the pass of each record and its place there: only messages and random states need them."""
        if self.sources is None:
            self.read()
            self.sources = [each for block, first, last in self.pieces for each in block.sources(first, last)]
        return self.sources


@final
class Records(SliceKeys, Sequence[int]):
    """The records of a slice, a part of a run; as a sequence, their places in the order of the parts as given."""

    __slots__ = ("_first", "_last", "_length", "_seed", "run")

    def __init__(self, run: RecordRun, first: int, last: int, seed: int) -> None:
        self.run = run
        self._first = first
        self._last = last
        self._length = last - first
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        """Return it for a loading process: without the blocks, which hold records of other slices too."""
        sent = RecordRun(None, 0, self._length, values=self.items(), sources=self._sources())
        return Records, (sent, 0, self._length, self._seed)

    def read(self) -> None:
        self.run.read()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return [place for _, place in self._sources()][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def items(self) -> list[Any]:
        return self.run.read()[self._first : self._last]

    def indices(self) -> Sequence[int]:
        return self

    def seeds(self, number: int) -> list[int]:
        return [derive_seed("sample", self._seed, *source) for source in self._sources()[:number]]

    def first(self, number: int) -> "Records":
        return Records(self.run, self._first, min(self._first + number, self._last), self._seed)

    def later(self, epochs: int) -> "Records":
        return Records(self.run, self._first, self._last, self._seed + epochs)

    def _sources(self) -> list[tuple[int, int]]:
        return self.run.find_sources()[self._first : self._last]


def _read_pass(stream: Stream, order: BlockOrder, start: BlockStart) -> Iterator[RecordBlock]:
    reader = PassReader(stream, order.parts(len(stream.parts), start.pass_number), start, order.seed)
    number, block, place, total = start.pass_number, start.block, start.place, start.total
    while True:
        state, (part, offset) = reader.state(), reader.position
        size = order.size_of(number, block)
        if stream.limit is not None:
            size = min(size, stream.limit - place)
        values = reader.read(size)
        if not values:
            return
        begin = BlockStart(
            total=total, pass_number=number, block=block, place=place, part=part, offset=offset, state=state
        )
        yield RecordBlock(begin, values, order, derive_seed("block", order.seed, number, block))
        block, place, total = block + 1, place + len(values), total + len(values)


def _number_of(values: Sequence[Any]) -> int:
    """Return a number for records: of the first, the last and some between, since each takes time."""
    some = [values[0], values[-1], *values[:: -(-len(values) // _NUM_COMPARED)]]
    return records_number(len(values), some)


@final
class PassReader:
    def __init__(self, stream: Stream, parts: Sequence[int], start: BlockStart, seed: int) -> None:
        self._stream = stream
        self._parts = parts
        self._pass_number = start.pass_number
        self._block = start.block
        self._seed = seed
        self.position = (start.part, start.offset)
        self._open: OpenPart | None = None
        # Most parts are names: they hold no generator, and are not searched through for each block.
        held = [] if all(isinstance(part, str | int) for part in stream.parts) else stream.parts
        self._own = OwnGenerators([("", (held, stream.read))])
        self._random = RandomState(0, self._own)
        self._state = start.state

    def state(self) -> Any:
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
        return RandomState(seed, self._own)

    def _begin(self, part: int, offset: int) -> OpenPart:
        opened = self._stream.open(part, self._pass_number)
        if self._state is not None:
            opened.load(self._state)
            self._state = None
        else:
            next(islice(opened, offset, offset), None)  # read and drop
        return opened


def read_blocks(
    stream: Stream, order: BlockOrder, total: int, *, first_pass: int, is_endless: bool, noted: BlockStart | None
) -> Iterator[RecordBlock]:
    """Yield the blocks from that one on which holds the record after `total` others.

    They are read from `noted` on, a block before or at that record, if there is one.
    """
    beginning = BlockStart(total=0, pass_number=first_pass, block=0, place=0)
    if noted is not None and (stream.read is not None or noted.state is not None):
        blocks = _read_passes(stream, order, noted, is_endless=is_endless)
        first = next(blocks, None)
        if first is not None and noted.number in {None, first.start.number}:
            return _skip(chain([first], blocks), total, None)
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
    return _skip(_read_passes(stream, order, beginning, is_endless=is_endless), total, noted)


def _read_passes(stream: Stream, order: BlockOrder, start: BlockStart, *, is_endless: bool) -> Iterator[RecordBlock]:
    while True:
        total, is_empty = start.total, start.place == 0
        for block in _read_pass(stream, order, start):
            yield block
            total, is_empty = block.stop, False
        if not is_endless:
            return
        if is_empty:
            raise ValueError(f"The stream has no records in pass {start.pass_number}, so it does not go on. (LS410)")
        start = BlockStart(total=total, pass_number=start.pass_number + 1, block=0, place=0)


def _skip(blocks: Iterator[RecordBlock], total: int, noted: BlockStart | None) -> Iterator[RecordBlock]:
    """Drop the blocks before a record; check that they are what they were when a place was noted."""
    for block in blocks:
        if noted is not None and block.total == noted.total and block.start.number != noted.number:
            raise ValueError(
                f"The stream has other records now: those from record {block.start.place} on are not what they were "
                "when the checkpoint was written, so samples would come twice, or never. A stream must give the same "
                "records whenever it is read: sort what it lists, and let what it shuffles depend on "
                "set_epoch(epoch). (LS410)"
            )
        if block.stop > total:
            yield block


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
