"""The samples of a stream that every worker reads as a whole, keeping its own slices.

A worker reads one record more than a step needs. So it knows which step is the last one without asking the others, who
have read the same records: the step table compares what they know.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, final

from torch.utils.data import Dataset

from lockstep.data.blocks import BlockOrder, BlockStart, Place, Record, RecordQueue, open_queue
from lockstep.data.contents import slice_number
from lockstep.data.keyed import RandomState, SliceKeys
from lockstep.data.samples import Draws, EpochBegin, EpochSamples, Samples
from lockstep.data.stream import Stream
from lockstep.shards import derive_seed, split_evenly

_HEAD = 12
"""So many records are read twice, to see whether they are the same, and compared between workers."""
_MIN_BLOCK = 64
"""Records that are read together where they are not shuffled."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeys(SliceKeys):
    """What a loading process needs for a slice of records."""

    records: Sequence[Record]
    seed: int

    def indices(self) -> Sequence[Any]:
        return self.records

    def seeds(self, number: int) -> list[int]:
        records = self.records[:number]
        return [derive_seed("sample", self.seed, each.pass_number, each.place) for each in records]


@final
class Transformed(Dataset[Any]):
    """Makes samples of records; a data set whose index is a record."""

    def __init__(self, transform: Callable[[Any], Any] | None) -> None:
        self._transform = transform

    def __getitem__(self, record: Record) -> Any:
        if self._transform is None:
            return record.value
        # A slice may be loaded again: what the function changes in a record must not be there then.
        return self._transform(deepcopy(record.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How an epoch of a stream is cut."""

    batch_size: int
    num_shards: int
    drop_last: bool
    seed: int
    """Of the order and of the samples' random states."""
    shuffle: bool

    def slices(self, records: Sequence[Any]) -> list[Draws]:
        return [records[start:stop] for start, stop in split_evenly(len(records), self.num_shards)]


@final
class StreamedSamples(Samples):
    def __init__(self, stream: Stream, cut: Cut) -> None:
        self._stream = stream
        self._cut = cut
        size = stream.buffer_size if cut.shuffle else max(cut.batch_size, _MIN_BLOCK)
        self._order = BlockOrder(seed=cut.seed, size=size, shuffle=cut.shuffle)
        self._content = read_head(stream, cut.seed)
        self._last_queue: RecordQueue | None = None

    @property
    def num_samples(self) -> int | None:
        if self._stream.steps_per_epoch is not None:
            return self._stream.steps_per_epoch * self._cut.batch_size
        return self._stream.num_records

    def __str__(self) -> str:
        return f"{self._stream}, {f'shuffled among {self._order.size}' if self._cut.shuffle else 'in order'}"

    def content(self) -> int:
        return self._content

    def alone(self) -> Self:
        other = copy(self)
        other._last_queue = None  # noqa: SLF001 - of this class
        return other

    def epoch(self, begin: EpochBegin) -> EpochSamples:
        epoch, steps = begin.epoch, self._stream.steps_per_epoch
        before = 0 if steps is None else epoch * steps * self._cut.batch_size
        total = before + begin.first_step * self._cut.batch_size
        queue, self._last_queue = self._last_queue, None
        if queue is None or queue.total != total or queue.is_reading:
            queue = open_queue(
                self._stream,
                self._order,
                first_pass=epoch if steps is None else 0,
                is_endless=steps is not None,
                total=total,
                noted=self._find_place(epoch, total, begin.bookmark),
            )
        if steps is not None:  # the next epoch reads on where this one ends
            self._last_queue = queue
        return StreamedEpoch(
            queue,
            self._cut,
            first_step=begin.first_step,
            num_samples=self.num_samples,
            total_before=before,
            epoch=None if steps is not None else epoch,
            drops_last=self._cut.drop_last and not begin.keeps_last,
        )

    def check_unchanged(self) -> None:
        """Do nothing: the end of a stream is found when it is read."""

    def _find_place(self, epoch: int, total: int, bookmark: Mapping[str, Any]) -> Place | None:
        """Return a place to begin at, before or at the record after `total` others."""
        if bookmark and bookmark["epoch"] in {None, epoch}:
            place = Place.from_mapping(bookmark)
            if place.total <= total:
                return place
        if self._stream.lengths is None or not total or self._cut.shuffle:
            return None
        block = self._order.block_at(epoch, total)
        place_of_block = left = self._order.place_of(epoch, block)
        for part, length in enumerate(self._stream.lengths):
            if left < length:
                start = BlockStart(pass_number=epoch, block=block, place=place_of_block, part=part, offset=left)
                return Place(start=start, total=place_of_block)
            left -= length
        return None


@final
class StreamedEpoch(EpochSamples):
    """An epoch of a stream, of which `queue` begins at `first_step`; without `epoch`, a bookmark is for any epoch."""

    def __init__(
        self,
        queue: RecordQueue,
        cut: Cut,
        *,
        first_step: int,
        num_samples: int | None,
        total_before: int,
        epoch: int | None,
        drops_last: bool,
    ) -> None:
        self._queue = queue
        self._cut = cut
        self._first_step = self._next = first_step
        self._total_before = total_before
        self._epoch = epoch
        self._drops_last = drops_last
        self._known = None if num_samples is None else count_steps(num_samples, cut.batch_size, drops_last=drops_last)
        self._num_steps = self._known if epoch is None else None
        self._cuts: dict[int, list[Draws]] = {}

    def cut(self, step: int) -> list[Draws]:
        while self._next <= step and self._next != self._num_steps:
            self._read_step()
        found: list[Draws] = self._cuts.get(step, [[]] * self._cut.num_shards)
        return found

    def num_steps(self, step: int) -> int | None:
        """Return the steps of the epoch; None if they are not known in `step`, whatever was read ahead."""
        return self._known if self._known is not None else self._num_steps if self._num_steps == step + 1 else None

    def number(self, step: int) -> int:
        """Return a number for the block in which a step begins."""
        place = self._queue.place_of(self._total(step))
        return 0 if place is None else place.start.number or 0

    def keys(self, draws: Draws) -> RecordKeys:
        return RecordKeys(records=draws, seed=self._cut.seed)

    def indices(self, draws: Draws) -> Sequence[int]:
        return [record.place for record in draws]

    def forget(self, step: int) -> None:
        self._cuts.pop(step, None)
        self._queue.forget(self._total(step + 1))

    def bookmark(self, step: int) -> Mapping[str, Any]:
        """Return the block in which a step begins; empty for none."""
        place = self._queue.place_of(self._total(step))
        found = {} if place is None else place.to_mapping()
        return {"epoch": self._epoch, **found} if found else {}

    def _total(self, step: int) -> int:
        return self._total_before + step * self._cut.batch_size

    def _read_step(self) -> None:
        """Cut the next step, and look whether another one follows."""
        size, step = self._cut.batch_size, self._next
        there = self._queue.fill(size)
        if there == 0 or (there < size and self._drops_last):
            self._end(step)  # the first step that was asked for is beyond the end
            return
        self._cuts[step] = self._cut.slices(self._queue.take(min(size, there)))
        self._next = step + 1
        needed = size if self._drops_last else 1
        if self._num_steps is None and self._queue.fill(needed) < needed:
            self._end(self._next)

    def _end(self, num_steps: int) -> None:
        if not num_steps:
            too_few = "fewer than a batch, and drop_last=True leaves them out" if self._drops_last else "none at all"
            raise ValueError(f"The stream has {self._queue.fill(1)} samples: {too_few}. (LS409)")
        self._num_steps = num_steps


def count_steps(num_samples: int, batch_size: int, *, drops_last: bool) -> int:
    return num_samples // batch_size if drops_last else math.ceil(num_samples / batch_size)


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
    found = (read_part_head(stream, seed, part, _HEAD) for part in range(len(stream.parts)))
    return next(filter(None, found), [])  # the first ones may be empty


def read_part_head(stream: Stream, seed: int, part: int, count: int) -> list[int]:
    """Return a number for each of the first records of a part."""
    with RandomState(derive_seed("stream", seed, 0, 0), (stream.parts, stream.read)).entered():
        return list(map(slice_number, islice(stream.open(part, 0), count)))
