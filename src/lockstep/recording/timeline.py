"""One timeline from the files of several workers: the clocks of several hosts are brought together.

[Note: clocks of several hosts] Processes of one boot of a host share the monotonic clock. For another host the
difference is found from the recording: no rank can leave a collective before every rank has entered it. So with clock
`a` and `b = a + d`, each collective that both made says

    begin_a <= end_b - d     d <= end_b - begin_a
    begin_b - d <= end_a     d >= begin_b - end_a

The largest lower and the smallest upper bound of all common collectives leave an interval. Its middle is taken, and
half its width is the error. Without common collectives the wall clocks decide, whose error is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.recording.file_format import EventKind
from lockstep.recording.reading import FileEvents

_FEWEST = 3
"""From so many common collectives the difference of two clocks is found."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What is subtracted from the times of a file to have them on the clock of the first one."""

    nanoseconds: int
    error_ns: int | None
    """How far off it may be; 0 on one host, None if that is not known."""


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


def clock_offsets(files: Sequence[FileEvents]) -> list[ClockOffset]:
    """Return the offset of each file's clock to the first one's. [Note: clocks of several hosts]."""
    if not files:
        return []
    first = files[0]
    return [_offset(first, each) for each in files]


def _offset(first: FileEvents, other: FileEvents) -> ClockOffset:
    if other.header.boot == first.header.boot:
        return ClockOffset(0, 0)
    bounds = bound_offset(_collectives(first), _collectives(other))
    if bounds is not None:
        lower, upper = bounds
        return ClockOffset((lower + upper) // 2, (upper - lower + 1) // 2)
    wall = [each.header.opened_ns - each.header.opened_wall_ns for each in (first, other)]
    return ClockOffset(wall[1] - wall[0], None)


def _collectives(file: FileEvents) -> dict[int, tuple[int, int]]:
    table = file.table
    rows = table[(table["kind"] == EventKind.COLLECTIVE) & (table["end"] > 0)]
    columns = (np.asarray(rows[name]).tolist() for name in ("index", "begin", "end"))
    return {index: (begin, end) for index, begin, end in zip(*columns, strict=True)}
