"""The samples of a stream whose parts have known lengths: each shard has a share of its own, which its worker reads.

The parts are put into the order of the epoch, one behind the other, and this line is cut into as many shares as there
are shards, to the record: no share ends sooner than the others, however uneven the parts are.

    parts in the order of the epoch   | c c c c c c | a a | d d d d d d d d d | b b b |
    shares of three shards            | 0 0 0 0 0 0   0 | 1 1 1 1 1 1 1 | 2 2   2 2 2 |

A share is read in blocks, and shuffled within them. It begins anywhere, so nothing of it is kept in a checkpoint, and
another worker may go on with it.

No record is read by two workers, so nothing that is read shows whether they have the same stream. Instead each of them
reads the first records of some parts when the loader is made.
"""

import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self, final

from lockstep.data.blocks import BlockOrder, BlockStart, PassReader, Record, make_records
from lockstep.data.keyed import SliceKeys
from lockstep.data.samples import Draws, EpochBegin, EpochSamples, Samples
from lockstep.data.stream import Stream
from lockstep.data.streamed import Cut, RecordKeys, count_steps, read_head, read_part_head
from lockstep.shards import derive_seed, split_evenly

_NUM_PARTS = 16
"""Of so many parts, evenly spaced, the first records are compared between workers."""
_NUM_RECORDS = 2
"""So many records of each."""


def can_be_divided(stream: Stream, cut: Cut) -> bool:
    """Whether each shard can have a share of a stream: not in the order of the stream, where all read all."""
    is_whole = stream.read is None or stream.lengths is None or stream.limit is not None
    return cut.shuffle and not is_whole and len(stream.parts) >= cut.num_shards


@final
class DividedSamples(Samples):
    def __init__(self, stream: Stream, cut: Cut) -> None:
        self._stream = stream
        self._cut = cut
        self._content = _content_number(stream, cut.seed)

    @property
    def num_samples(self) -> int | None:
        return self._stream.num_records

    def __str__(self) -> str:
        return f"{self._stream}, a share for each shard, shuffled among {self._stream.buffer_size}"

    def content(self) -> int:
        return self._content

    def epoch(self, begin: EpochBegin) -> EpochSamples:
        return DividedEpoch(
            self._stream, self._cut, begin.epoch, drops_last=self._cut.drop_last and not begin.keeps_last
        )

    def alone(self) -> Self:
        return self

    def check_unchanged(self) -> None:
        """Do nothing: the length of a part is checked when it was read."""


@final
class DividedEpoch(EpochSamples):
    def __init__(self, stream: Stream, cut: Cut, epoch: int, *, drops_last: bool) -> None:
        assert stream.lengths is not None
        self._cut = cut
        self._line = _Line(stream, cut, epoch)
        num_samples = sum(stream.lengths)
        self._known_steps = count_steps(num_samples, cut.batch_size, drops_last=drops_last)
        self._num_whole, rest = divmod(num_samples, cut.batch_size)
        self._whole = _sizes(cut.batch_size, cut.num_shards)
        self._rest = _sizes(0 if drops_last else rest, cut.num_shards)
        totals = [self._num_whole * whole + rest for whole, rest in zip(self._whole, self._rest, strict=True)]
        self._shares = [range(stop - total, stop) for total, stop in zip(totals, accumulate(totals), strict=True)]
        self._readers: dict[int, _ShareReader] = {}

    def cut(self, step: int) -> list[Draws]:
        """Return the records of each shard in a step; they are read when they are looked at."""
        sizes = self._whole if step < self._num_whole else self._rest
        if step >= self._known_steps:
            return [[] for _ in sizes]
        return [
            _Span(self._reader_of(shard).take, step * whole, step * whole + size)
            for shard, (whole, size) in enumerate(zip(self._whole, sizes, strict=True))
        ]

    def num_steps(self, step: int) -> int:  # noqa: ARG002 - as for other streams
        return self._known_steps

    def number(self, step: int) -> int:  # noqa: ARG002 - as for other streams
        """Return 0: no worker reads what another one does."""
        return 0

    def keys(self, draws: Draws) -> SliceKeys:
        return RecordKeys(records=list(draws), seed=self._cut.seed)

    def indices(self, draws: Draws) -> Sequence[int]:
        """Return where the records are in the stream, in the order of its parts as they were given."""
        return [record.place for record in draws]

    def forget(self, step: int) -> None:
        for shard, reader in self._readers.items():
            reader.forget((step + 1) * self._whole[shard])

    def bookmark(self, step: int) -> Mapping[str, Any]:  # noqa: ARG002 - as for other streams
        """Return nothing: an epoch begins anywhere."""
        return {}

    def _reader_of(self, shard: int) -> "_ShareReader":
        if shard not in self._readers:
            self._readers[shard] = _ShareReader(self._line, self._shares[shard], shard)
        return self._readers[shard]


@final
class _Span(Sequence[Record]):
    """A slice of a share, which is read when it is looked at."""

    def __init__(self, take: Callable[[int, int], list[Record]], start: int, stop: int) -> None:
        self._take = take
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: Any) -> Any:
        return self._take(self._start, self._stop)[index]


@final
class _Line:
    """All records of an epoch: the parts in its order, one behind the other."""

    def __init__(self, stream: Stream, cut: Cut, epoch: int) -> None:
        assert stream.lengths is not None
        self.epoch = epoch
        self.seed = cut.seed
        self.reading = threading.Lock()
        """A thread of the user's may fetch batches while the trainer's cuts one for other workers."""
        self._stream = stream
        size = -(-stream.buffer_size // cut.num_shards)
        self.order = BlockOrder(seed=cut.seed, size=size, shuffle=True)
        self._parts = self.order.parts(len(stream.parts), epoch)
        self._lengths = [stream.lengths[part] for part in self._parts]
        self._begins = [0, *accumulate(self._lengths)]
        self._places = [0, *accumulate(stream.lengths)]

    def open(self, first: int) -> PassReader:
        part = bisect_right(self._begins, first) - 1
        start = BlockStart(pass_number=self.epoch, block=0, place=0, part=part, offset=first - self._begins[part])
        return PassReader(self._stream, self._parts, start, self.seed)

    def read(self, reader: PassReader, first: int, count: int) -> list[Record]:
        """Return the next records, which begin with `first`."""
        values = reader.read(count)
        return make_records(
            [(self.epoch, self._place_of(place), value) for place, value in enumerate(values, start=first)]
        )

    def _place_of(self, number: int) -> int:
        """Return the place of a record if the parts come in the order in which they were given."""
        part = bisect_right(self._begins, number) - 1
        return self._places[self._parts[part]] + number - self._begins[part]


@final
class _ShareReader:
    """Reads the share of one shard in blocks, and keeps those that are still needed."""

    def __init__(self, line: _Line, share: range, shard: int) -> None:
        self._line = line
        self._share = share
        self._shard = shard
        self._blocks: dict[int, list[Record]] = {}
        self._reader: PassReader | None = None
        self._next_block = 0

    def take(self, start: int, stop: int) -> list[Record]:
        """Return records of the shuffled share."""
        size = self._line.order.size
        found: list[Record] = []
        with self._line.reading:
            for block in range(start // size, -(-stop // size)):
                if block not in self._blocks:
                    self._blocks[block] = self._read_block(block)
                begin = block * size
                found += self._blocks[block][max(start - begin, 0) : stop - begin]
        return found

    def forget(self, start: int) -> None:
        """Drop what comes before a record of the shuffled share."""
        with self._line.reading:
            for block in [block for block in self._blocks if (block + 1) * self._line.order.size <= start]:
                del self._blocks[block]

    def _read_block(self, block: int) -> list[Record]:
        line, size = self._line, self._line.order.size
        numbers = self._share[block * size : (block + 1) * size]
        if self._reader is None or self._next_block != block:
            self._reader = line.open(numbers.start)
        self._next_block = block + 1
        records = line.read(self._reader, numbers.start, len(numbers))
        seed = derive_seed("share block", line.seed, line.epoch, self._shard, block)
        return [records[index] for index in line.order.shuffled(len(records), seed)]


def _content_number(stream: Stream, seed: int) -> int:
    """Return a number for the first records of the stream and of some parts, the same wherever they are read."""
    assert stream.lengths is not None
    head = read_head(stream, seed)
    filled = [part for part, length in enumerate(stream.lengths) if length]
    chosen = sorted({filled[number * (len(filled) - 1) // (_NUM_PARTS - 1)] for number in range(_NUM_PARTS)})
    heads = [read_part_head(stream, seed, part, _NUM_RECORDS) for part in chosen]
    return zlib.crc32(repr((head, heads)).encode()) or 1


def _sizes(total: int, num_shards: int) -> list[int]:
    return [stop - start for start, stop in split_evenly(total, num_shards)]
