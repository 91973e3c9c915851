"""The records of a stream in the order of the samples, from any place of a run on."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, final

from lockstep.data.blocks import BlockOrder, BlockStart, Record, RecordBlock, read_blocks
from lockstep.data.stream import Stream

_NUM_TOLD = 10_000
"""Reading over fewer records is not worth a message."""
_PLAIN = (bool, int, float, str, type(None))


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
            stacklevel=5,
        )
    elif total >= _NUM_TOLD:
        warnings.warn(
            f"The stream is read from its beginning, over {total:,} records that were seen already. That is not "
            "necessary where the stream is a list of parts, ls.Stream(files, read=...), or has state_dict and "
            "load_state_dict, and the loader is saved with the trainer: "
            "trainer.save(path, extra={'loader': loader}). (LS411)",
            stacklevel=5,
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
