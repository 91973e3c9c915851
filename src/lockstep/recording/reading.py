"""Reading the files of a recording: of a job that runs, or of one that is gone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lockstep.recording.file_format import (
    EVENT_BYTES,
    HEADER_BYTES,
    RING_START,
    TEXT_SHIFT,
    EventKind,
    FileHeader,
    file_bytes,
    parse_header,
    read_text,
)

_WORDS: Final = EVENT_BYTES // 8
_KIND_MASK: Final = (1 << TEXT_SHIFT) - 1
EVENT_TYPE: Final = np.dtype(
    [
        *(("number", "i8"), ("begin", "i8"), ("end", "i8"), ("kind", "i8"), ("text", "i8")),
        *(("step", "i8"), ("index", "i8"), ("size", "i8")),
    ]
)
_FEWEST = 3
"""From so many common collectives the difference of two clocks is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneEvent:
    number: int
    begin: int
    """When it began, in nanoseconds of the host's monotonic clock."""
    end: int
    """When it ended; 0 while it is under way."""
    kind: int
    """Its `EventKind`; a number that this version does not know is kept."""
    text: str
    step: int
    """The step: updates since the run began; 0 before the first."""
    index: int
    """Shard, bucket, rank, ...: see `EventKind`."""
    size: int
    """Bytes, or what `EventKind` says."""


@dataclass(frozen=True, slots=True, eq=False)
class FileEvents:
    path: Path
    header: FileHeader
    table: NDArray[Any]
    """The events in the order of their numbers, as a structured array with the fields of `OneEvent`; texts by place."""
    texts: bytes

    @property
    def is_launchers(self) -> bool:
        return self.header.worker < 0

    def text(self, place: int) -> str:
        return read_text(self.texts, place)

    def event(self, position: int) -> OneEvent:
        """Return the event at a position of the table, which may count from its end."""
        row = self.table[position]
        fields = {name: int(row[name]) for name in ("number", "begin", "end", "kind", "step", "index", "size")}
        return OneEvent(text=self.text(int(row["text"])), **fields)

    def events(self, kind: EventKind | None = None) -> list[OneEvent]:
        positions = range(len(self.table)) if kind is None else np.flatnonzero(self.table["kind"] == kind).tolist()
        return [self.event(position) for position in positions]

    def under_way(self) -> list[OneEvent]:
        return [self.event(position) for position in np.flatnonzero(self.table["end"] == 0).tolist()]

    def collectives(self) -> dict[int, tuple[int, int]]:
        """Return when each collective began and ended, of those that have, by its number."""
        rows = self.table[(self.table["kind"] == EventKind.COLLECTIVE) & (self.table["end"] > 0)]
        columns = (np.asarray(rows[name]).tolist() for name in ("index", "begin", "end"))
        return {index: (begin, end) for index, begin, end in zip(*columns, strict=True)}

    def last(self, kind: EventKind) -> OneEvent | None:
        positions = np.flatnonzero(self.table["kind"] == kind)
        return self.event(int(positions[-1])) if len(positions) else None


def read_file(path: Path) -> FileEvents:
    """Read one file, which may be written meanwhile; `ValueError` if it is no recording of this version."""
    header, first, texts = _copy(path)
    _, second, texts = _copy(path)
    return FileEvents(path=path, header=header, table=_parse(first, second), texts=texts)


def read_recording(directory: Path) -> list[FileEvents]:
    """Read a recording: workers by number, then the launcher; without files damaged or of another version."""
    found = []
    for path in sorted(directory.glob("*.rec")):
        try:
            found.append(read_file(path))
        except ValueError:
            continue
    return sorted(found, key=lambda each: (each.is_launchers, each.header.worker, each.header.opened_ns))


def _copy(path: Path) -> tuple[FileHeader, NDArray[Any], bytes]:
    data = path.read_bytes()
    header = parse_header(data)
    if len(data) < file_bytes(header.capacity):
        raise ValueError("a file of a recording that was cut off.")
    words = np.frombuffer(data, np.int64, count=header.capacity * _WORDS, offset=RING_START)
    return header, words.reshape(header.capacity, _WORDS), data[HEADER_BYTES:RING_START]


def _parse(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Return the events that two copies of the ring agree on. [Note: a torn event]."""
    is_same = (first == second).all(axis=1)
    slots = np.arange(len(first))
    number = first[:, 0] - 1
    is_used = first[:, 0] != 0
    is_whole = is_used & is_same & (first[:, 0] == first[:, -1]) & (number % len(first) == slots) & (number >= 0)
    rows = first[is_whole]
    table = np.zeros(len(rows), EVENT_TYPE)
    table["number"], table["begin"], table["end"] = rows[:, 0] - 1, rows[:, 1], rows[:, 2]
    table["kind"], table["text"] = rows[:, 3] & _KIND_MASK, rows[:, 3] >> TEXT_SHIFT
    table["step"], table["index"], table["size"] = rows[:, 4], rows[:, 5], rows[:, 6]
    return table[np.argsort(table["number"])]


def bound_offset(here: Mapping[int, tuple[int, int]], there: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Return the least and the greatest difference of two clocks that common collectives allow; None for too few.

    `here` and `there` are the begin and the end of each collective, by its number.
    """
    common = here.keys() & there.keys()
    if len(common) < _FEWEST:
        return None
    lower = max(there[number][0] - here[number][1] for number in common)
    upper = min(there[number][1] - here[number][0] for number in common)
    return (lower, upper) if lower <= upper else None


def clock_offsets(files: Sequence[FileEvents]) -> list[int]:
    """Return the nanoseconds to subtract from each file's times to have them on the clock of the first one.

    [Note: clocks of several hosts] Processes of one boot of a host share the monotonic clock. For another host the
    difference is found from the recording: no rank can leave a collective before every rank has entered it. So with
    clock `a` and `b = a + d`, each collective that both made says

        begin_a <= end_b - d     d <= end_b - begin_a
        begin_b - d <= end_a     d >= begin_b - end_a

    The largest lower and the smallest upper bound of all common collectives leave an interval, whose middle is taken.
    Without common collectives the wall clocks decide.
    """
    return [_offset(files[0], each) for each in files]


def _offset(first: FileEvents, other: FileEvents) -> int:
    if other.header.boot == first.header.boot:
        return 0
    bounds = bound_offset(first.collectives(), other.collectives())
    if bounds is not None:
        return sum(bounds) // 2
    wall = [each.header.opened_ns - each.header.opened_wall_ns for each in (first, other)]
    return wall[1] - wall[0]
