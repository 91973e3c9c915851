"""When a worker has last begun or ended something: read often, so without NumPy and without a copy of the file."""

import mmap
from pathlib import Path

from lockstep.recording.file_format import (
    END_WORD,
    EVENT_BYTES,
    HEADER_BYTES,
    RING_START,
    FileHeader,
    file_bytes,
    parse_header,
)

_WORDS = EVENT_BYTES // 8
_BEGIN_WORD = 1


def last_moment(path: Path) -> tuple[FileHeader, int] | None:
    """Return who wrote a file, and when it has last begun or ended an event, in nanoseconds of its clock (local).

    None if it is not a file of a recording, or is being made.
    """
    with path.open("rb") as file:
        try:
            header = parse_header(file.read(HEADER_BYTES))
            memory = mmap.mmap(file.fileno(), file_bytes(header.capacity), access=mmap.ACCESS_READ)
        except ValueError:
            return None
    with memory, memoryview(memory) as data, data[RING_START:].cast("q") as words:
        moments = [max(words[word::_WORDS]) for word in (_BEGIN_WORD, END_WORD)]
    return header, max(*moments, header.opened_ns)
