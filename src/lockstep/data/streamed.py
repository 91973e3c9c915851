"""The samples of a stream, which are read in one of two ways.

Every worker reads the whole stream, and keeps its own slices. It reads one record more than a step needs. So it knows
which step is the last one without asking the others, who have read the same records: the step table compares what they
know.

Or the stream is divided: its parts have known lengths, and each shard has a share of its own, which its worker reads.
The parts are put into the order of the epoch, one behind the other, and this line is cut into as many shares as there
are shards, to the record: no share ends sooner than the others, however uneven the parts are.

    parts in the order of the epoch   | c c c c c c | a a | d d d d d d d d d | b b b |
    shares of three shards            | 0 0 0 0 0 0   0 | 1 1 1 1 1 1 1 | 2 2   2 2 2 |

A share is read in blocks, and shuffled within them. It begins anywhere, so nothing of it is kept in a checkpoint, and
another worker may go on with it. No record is read by two workers, so nothing that is read shows whether they have the
same stream. Instead each of them reads the first records of some parts when the loader is made.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, Self, cast, final

from torch.utils.data import Dataset

from lockstep.data.blocks import (
    BlockOrder,
    BlockStart,
    PassReader,
    RecordBlock,
    RecordLine,
    RecordRun,
    Records,
    read_blocks,
)
from lockstep.data.contents import slice_number
from lockstep.data.keyed import OwnGenerators, RandomState, SliceKeys
from lockstep.data.samples import Cut, EpochSamples, Samples
from lockstep.data.stream import Stream
from lockstep.shards import derive_seed, split_evenly

_HEAD = 12
"""So many records are read twice, to see whether they are the same, and compared between workers."""
_NUM_PARTS = 16
"""Of so many parts of a divided stream, evenly spaced, the first records are compared between workers."""
_NUM_RECORDS = 2
"""So many records of each."""
_MIN_BLOCK = 64
"""Records that are read together where they are not shuffled."""


@final
class Transformed(Dataset[Any]):
    """A data set whose index is a record."""

    def __init__(self, transform: Callable[[Any], Any] | None) -> None:
        self._transform = transform

    def __getitem__(self, record: Any) -> Any:
        if self._transform is None:
            return record
        # A slice may be loaded again: what the function changes in a record must not be there then.
        return self._transform(deepcopy(record))


@final
class StreamedSamples(Samples):
    def __init__(self, stream: Stream, cut: Cut) -> None:
        self._stream = stream
        self._cut = cut
        self._is_divided = _can_be_divided(stream, cut)
        size = stream.buffer_size if cut.shuffle else max(cut.batch_size, _MIN_BLOCK)
        if self._is_divided:
            size = -(-size // cut.num_shards)
        self._order = BlockOrder(seed=cut.seed, size=size, shuffle=cut.shuffle)
        head = read_head(stream, cut.seed)
        self._content = _with_parts(head, stream, cut.seed) if self._is_divided else head
        self._last_line: RecordLine | None = None

    @property
    def num_samples(self) -> int | None:
        if self._stream.steps_per_epoch is not None:
            return self._stream.steps_per_epoch * self._cut.batch_size
        return self._stream.num_records

    def __str__(self) -> str:
        shares = "a share for each shard, " if self._is_divided else ""
        how = f"shuffled among {self._stream.buffer_size}" if self._cut.shuffle else "in order"
        return f"{self._stream}, {shares}{how}"

    def content(self) -> int:
        return self._content

    def alone(self) -> Self:
        other = copy(self)
        other._last_line = None  # noqa: SLF001 - of this class
        return other

    def epoch(
        self, epoch: int, first_step: int = 0, *, each_once: bool = False, bookmark: Mapping[str, Any]
    ) -> EpochSamples:
        steps, drops_last = self._stream.steps_per_epoch, self._cut.drop_last and not each_once
        before = 0 if steps is None else epoch * steps * self._cut.batch_size
        if self._is_divided:
            lines = _lines_of_shares(self._stream, self._order, epoch, self._cut, drops_last=drops_last)
        else:
            lines = [self._open_line(epoch, before + first_step * self._cut.batch_size, bookmark)]
        return StreamedEpoch(
            lines,
            self._cut,
            num_samples=self.num_samples,
            before=before,
            epoch=None if steps is not None else epoch,
            is_divided=self._is_divided,
            drops_last=drops_last,
        )

    def check_unchanged(self) -> None:
        """Do nothing: a length that is wrong is found when the stream is read."""

    def _open_line(self, epoch: int, total: int, bookmark: Mapping[str, Any]) -> RecordLine:
        steps, last = self._stream.steps_per_epoch, self._last_line
        if last is not None and last.goes_on_at(total):
            return last
        line = RecordLine(
            partial(
                read_blocks,
                self._stream,
                self._order,
                first_pass=epoch if steps is None else 0,
                is_endless=steps is not None,
                noted=self._find_start(epoch, total, bookmark),
            )
        )
        self._last_line = None if steps is None else line  # the next epoch reads on where this one ends
        return line

    def _find_start(self, epoch: int, total: int, bookmark: Mapping[str, Any]) -> BlockStart | None:
        """Return a block to begin with, which holds the record after `total` others or comes before it."""
        if bookmark and bookmark["epoch"] in {None, epoch}:
            start = BlockStart.from_mapping(bookmark)
            if start.total <= total:
                return start
        if self._stream.lengths is None or not total or self._cut.shuffle:
            return None
        block = self._order.block_at(epoch, total)
        place = left = self._order.place_of(epoch, block)
        for part, length in enumerate(self._stream.lengths):
            if left < length:
                return BlockStart(total=place, pass_number=epoch, block=block, place=place, part=part, offset=left)
            left -= length
        return None


@final
class StreamedEpoch(EpochSamples):
    """An epoch of a stream: of one line, which `before` records precede in it, or of a line for each shard.

    Without `epoch`, a bookmark is for any epoch.
    """

    def __init__(
        self,
        lines: Sequence[RecordLine],
        cut: Cut,
        *,
        num_samples: int | None,
        before: int,
        epoch: int | None,
        is_divided: bool,
        drops_last: bool,
    ) -> None:
        self._lines = lines
        self._cut = cut
        self._parts = split_evenly(cut.batch_size, cut.num_shards)
        self._strides = _sizes(cut.batch_size, cut.num_shards) if is_divided else [cut.batch_size]
        self._num_samples = num_samples
        self._before = before
        self._epoch = epoch
        self._is_divided = is_divided
        self._drops_last = drops_last
        self._known = None if num_samples is None else cut.count_steps(num_samples, keeps_last=not drops_last)
        self._num_steps = self._known if is_divided or epoch is None else None
        self._cuts: dict[int, list[Records]] = {}

    def cut(self, step: int) -> Sequence[SliceKeys]:
        found = self._cuts.get(step)
        if found is None:
            found = self._cuts[step] = self._cut_anew(step)
        return found

    def _cut_anew(self, step: int) -> list[Records]:
        count, size, seed = self._count(step), self._cut.batch_size, self._cut.seed
        if not count:
            return []
        parts = self._parts if count == size else split_evenly(count, self._cut.num_shards)
        if self._is_divided:
            lengths = [stop - start for start, stop in parts]
            begins = [step * stride for stride in self._strides]
            return [
                Records(RecordRun(line, begin, begin + length), 0, length, seed)
                for line, begin, length in zip(self._lines, begins, lengths, strict=True)
                if length
            ]
        total = self._before + step * size
        run = RecordRun(self._lines[0], total, total + count)
        run.read()  # before the line drops it: what is another worker's may be needed, too
        return [Records(run, start, stop, seed) for start, stop in parts if stop > start]

    def num_steps(self, step: int) -> int | None:
        """Return the steps of the epoch; None if they are not known in `step`, whatever was read ahead."""
        return self._known if self._known is not None else self._num_steps if self._num_steps == step + 1 else None

    def number(self, slices: Sequence[SliceKeys]) -> int:
        """Return a number for the block in which a step begins; 0 where no worker reads what another one does."""
        return 0 if self._is_divided else _first_block(slices).start.number or 0

    def drop(self, step: int) -> None:
        self._cuts.pop(step, None)
        for line, stride in zip(self._lines, self._strides, strict=True):
            line.drop(self._before + (step + 1) * stride)

    def bookmark(self, slices: Sequence[SliceKeys]) -> Mapping[str, Any]:
        found = {} if self._is_divided else _first_block(slices).start.to_mapping()
        return {"epoch": self._epoch, **found} if found else {}

    def _count(self, step: int) -> int:
        """Return how many samples a step has; where that is found by reading, look whether another one follows."""
        if self._num_steps is not None and step >= self._num_steps:
            return 0
        size = self._cut.batch_size
        if self._is_divided:
            assert self._num_samples is not None
            return min(size, self._num_samples - step * size)
        wanted = size
        if self._num_steps is None:
            wanted += size if self._drops_last else 1
        total = self._before + step * size
        there = self._lines[0].read(total, total + wanted) - total
        if there <= 0 or (there < size and self._drops_last):
            self._end(step, max(there, 0))  # the first step that was asked for is beyond the end
            return 0
        if there < wanted and self._num_steps is None:
            self._end(step + 1, there)
        return min(size, there)

    def _end(self, num_steps: int, num_left: int) -> None:
        if not num_steps:
            too_few = "fewer than a batch, and drop_last=True leaves them out" if self._drops_last else "none at all"
            raise ValueError(f"The stream has {num_left} samples: {too_few}. (LS409)")
        self._num_steps = num_steps


@final
class _PartsInOrder:
    """All records of an epoch: the parts in its order, one behind the other."""

    def __init__(self, stream: Stream, order: BlockOrder, epoch: int) -> None:
        assert stream.lengths is not None
        self._stream = stream
        self._order = order
        self._epoch = epoch
        self._parts = order.parts(len(stream.parts), epoch)
        self._begins = [0, *accumulate(stream.lengths[part] for part in self._parts)]
        self._places = [0, *accumulate(stream.lengths)]

    def read_share(self, shard: int, share: range, stride: int, total: int) -> Iterator[RecordBlock]:
        """Yield the blocks of a share from that one on which holds the record after `total` others.

        The whole blocks among the `stride` records that a step needs of it are read together.
        """
        size, seed = self._order.size, self._order.seed
        at_once = max(stride // size, 1) * size
        reader = None
        for first in range(total // size * size, len(share), at_once):
            numbers = share[first : first + at_once]
            if reader is None:
                part = self._part_of(numbers.start)
                offset = numbers.start - self._begins[part]
                start = BlockStart(
                    total=total, pass_number=self._epoch, block=0, place=numbers.start, part=part, offset=offset
                )
                reader = PassReader(self._stream, self._parts, start, seed)
            records = reader.read(len(numbers))
            for begin in range(0, len(numbers), size):
                block = (first + begin) // size
                yield RecordBlock(
                    BlockStart(total=first + begin, pass_number=self._epoch, block=block, place=numbers.start + begin),
                    records[begin : begin + size],
                    self._order,
                    derive_seed("share block", seed, self._epoch, shard, block),
                    self._place_of,
                )

    def _part_of(self, number: int) -> int:
        return bisect_right(self._begins, number) - 1

    def _place_of(self, number: int) -> int:
        """Return the place of a record if the parts come in the order in which they were given."""
        part = self._part_of(number)
        return self._places[self._parts[part]] + number - self._begins[part]


def _lines_of_shares(stream: Stream, order: BlockOrder, epoch: int, cut: Cut, *, drops_last: bool) -> list[RecordLine]:
    assert stream.lengths is not None
    num_whole, rest = divmod(sum(stream.lengths), cut.batch_size)
    of_last = _sizes(0 if drops_last else rest, cut.num_shards)
    totals = [
        num_whole * whole + last for whole, last in zip(_sizes(cut.batch_size, cut.num_shards), of_last, strict=True)
    ]
    parts = _PartsInOrder(stream, order, epoch)
    shares = [range(start, stop) for start, stop in pairwise(accumulate(totals, initial=0))]
    stride = cut.batch_size // cut.num_shards
    return [RecordLine(partial(parts.read_share, shard, share, stride)) for shard, share in enumerate(shares)]


def _can_be_divided(stream: Stream, cut: Cut) -> bool:
    """Whether each shard can have a share of a stream: not in the order of the stream, where all read all."""
    is_whole = stream.read is None or stream.lengths is None or stream.limit is not None
    return cut.shuffle and not is_whole and len(stream.parts) >= cut.num_shards


def _first_block(slices: Sequence[SliceKeys]) -> RecordBlock:
    block, _, _ = cast("Records", slices[0]).run.pieces[0]
    return block


def _sizes(total: int, num_shards: int) -> list[int]:
    return [stop - start for start, stop in split_evenly(total, num_shards)]


def read_head(stream: Stream, seed: int) -> int:
    """Return a number for the first records of a stream, the same wherever it is read."""
    first, again = (_read_head(stream, seed) for _ in range(2))
    if not first:
        raise ValueError("The stream has no records. Check what it reads. (LS409)")
    if first != again:
        raise ValueError(
            "The stream is not repeatable: read a second time it gives other records, so samples would come twice, or "
            "never, when a run is resumed or on other workers. Let what it shuffles depend on set_epoch(epoch), and "
            "leave random changes of samples to `transform` of ls.Stream. (LS410)"
        )
    return zlib.crc32(repr(first).encode()) or 1


def _read_head(stream: Stream, seed: int) -> list[int]:
    found = (_read_part_head(stream, seed, part, _HEAD) for part in range(len(stream.parts)))
    return next(filter(None, found), [])  # the first ones may be empty


def _read_part_head(stream: Stream, seed: int, part: int, count: int) -> list[int]:
    """Return a number for each of the first records of a part."""
    own = OwnGenerators([("", (stream.parts, stream.read))])
    with RandomState(derive_seed("stream", seed, 0, 0), own).entered():
        return list(map(slice_number, islice(stream.open(part, 0), count)))


def _with_parts(head: int, stream: Stream, seed: int) -> int:
    """Return a number for the head of a stream and the first records of some parts, the same wherever they are read."""
    assert stream.lengths is not None
    filled = [part for part, length in enumerate(stream.lengths) if length]
    chosen = sorted({filled[number * (len(filled) - 1) // (_NUM_PARTS - 1)] for number in range(_NUM_PARTS)})
    heads = [_read_part_head(stream, seed, part, _NUM_RECORDS) for part in chosen]
    return zlib.crc32(repr((head, heads)).encode()) or 1
