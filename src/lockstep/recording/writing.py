"""`WorkerRecorder`: writes the events of this process.

[Note: the cost of an event] About 0.3 us: one `struct.pack_into` on the mapped file, with the clock and the next number
fetched in the same expression. Writing the eight words one by one, or through NumPy, takes longer. The functions are
closures: reading an attribute of `self` for each of six values would double the time. `benchmarks/recorder.py` measures
it. Under the GIL one `pack_into` is not interrupted by other threads, and `next` of a counter gives each event a number
of its own, so threads need no lock.

[Note: one clock] What moves shards to faster workers, `_get_ddp_logging_data`, the wait that others are told of, the
progress line and the speed of an epoch have the clock of the recorder; where they measure a part of a step, they read
its event. So a part of a step is measured in one place, and these numbers, the report and the doctor agree.
"""

import itertools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from lockstep.recording.file_format import (
    CHANGING,
    CHANGING_START,
    END_WORD,
    EVENT,
    EVENT_BYTES,
    HEADER_BYTES,
    MOST_TEXT,
    RING_START,
    TEXT_BYTES,
    TEXT_SHIFT,
    EventKind,
    FileHeader,
    file_bytes,
    pack_fixed,
)
from lockstep.recording.files import make_file

Begin = Callable[[int, int, int, int], int]
"""`begin(kind, index, size, text)`: an event begins; returns its number, for `end`."""
Mark = Callable[[int, int, int, int], int]
"""`mark(kind, index, size, text)`: an event without a duration, or which lasts until the next of its kind."""
End = Callable[[int], object]
"""`end(number)`: the event ends."""
NO_EVENT: Final = 0
"""A number that no event has."""
_NO_TEXT: Final = 0
_NUM_IN_MEMORY: Final = 4096
"""So many events are kept where there is no file."""


@final
class WorkerRecorder:
    """Records what this process does: in a file between `open` and `close`, else in memory of its own.

    So whoever needs to know how long something took reads it here, with or without a file. [Note: one clock]
    `moments(number)` returns when an event began and ended, in nanoseconds: 0 for an end that is not there yet, and
    (0, 0) if newer events have replaced it. `set_step(step)` holds for the events from then on.
    """

    def __init__(self) -> None:
        self._take_number = itertools.count(NO_EVENT + 1).__next__  # one count: a file has no number of the memory's
        self._use(bytearray(_NUM_IN_MEMORY * EVENT_BYTES), _NUM_IN_MEMORY, 0)
        self.is_open = False
        self.directory: Path | None = None
        self._memory: mmap.mmap | None = None
        self._texts: dict[str | bytes, int] = {}
        self._num_text_bytes = 8
        self._text_lock = threading.Lock()

    def open(self, path: Path, header: FileHeader) -> None:
        """Record into a new file from now on; `OSError` as of `make_file` (local)."""
        self.close()
        memory = make_file(path, file_bytes(header.capacity))
        memory[CHANGING_START : CHANGING_START + CHANGING.size] = CHANGING.pack(
            header.rank, header.world_size, header.generation, self._num_text_bytes, 0, -1
        )
        packed = pack_fixed(header)
        memory[8 : len(packed)] = packed[8:]
        memory[:8] = packed[:8]  # last: with it the file is a recording
        self._memory, self._texts, self._num_text_bytes = memory, {}, 8
        self._use(memory, header.capacity, RING_START)
        self.is_open, self.directory = True, path.parent
        self.mark(EventKind.STARTED, header.rank, header.pid, 0)

    @staticmethod
    def seconds() -> float:
        """Return the moment on the clock of the events, in seconds. [Note: one clock]."""
        return time.monotonic_ns() / 1e9

    def text(self, text: str | bytes) -> int:
        """Return the place of a text in the file, which is written there when it is new; 0 if there is no space."""
        place = self._texts.get(text)
        return self._add_text(text) if place is None else place

    @contextmanager
    def during(self, kind: EventKind, index: int = 0, size: int = 0, text: str = "") -> Iterator[None]:
        """Record an event that lasts as long as the block; for what is long, or seldom."""
        number = self.begin(kind, index, size, self.text(text) if text else 0)
        try:
            yield
        finally:
            self.end(number)

    def set_place(self, rank: int, world_size: int, generation: int) -> None:
        """Write which worker this process is from now on (local)."""
        memory = self._memory
        if memory is not None:
            struct.pack_into("@3q", memory, CHANGING_START, rank, world_size, generation)
            self.mark(EventKind.GENERATION, generation, world_size, 0)

    def close(self, exit_code: int = -1) -> None:
        """Write no more events to the file; what was recorded stays in the file (local)."""
        memory = self._memory
        if memory is None:
            return
        self.mark(EventKind.ENDED, 0, 0, 0)
        struct.pack_into("@2q", memory, CHANGING_START + 32, time.monotonic_ns(), exit_code)
        self.forget()

    def forget(self) -> None:
        """Write nothing more, not even an end: called in a forked child, whose parent goes on recording."""
        self._use(bytearray(_NUM_IN_MEMORY * EVENT_BYTES), _NUM_IN_MEMORY, 0)
        # The memory is not unmapped: another thread may be writing an event.
        self._memory, self._texts, self.is_open, self.directory = None, {}, False, None
        self._text_lock = threading.Lock()  # in a forked child a thread of the parent may hold the other one for ever

    def _use(self, memory: mmap.mmap | bytearray, capacity: int, start: int) -> None:
        writers = _writers(memory, capacity, start, self._take_number)
        self.begin, self.end, self.mark, self.set_step, self.moments = writers

    def _add_text(self, text: str | bytes) -> int:
        memory = self._memory
        if memory is None:
            return _NO_TEXT
        data = (text.encode(errors="replace") if isinstance(text, str) else text)[:MOST_TEXT]
        with self._text_lock:
            place = self._texts.get(text)
            if place is not None:
                return place
            place, end = self._num_text_bytes, self._num_text_bytes + 2 + len(data)
            if end > TEXT_BYTES:
                return _NO_TEXT
            start = HEADER_BYTES + place
            memory[start : start + 2 + len(data)] = struct.pack("<H", len(data)) + data
            self._num_text_bytes = end
            struct.pack_into("@q", memory, CHANGING_START + 24, end)
            self._texts[text] = place
        return place


def _writers(
    memory: mmap.mmap | bytearray, capacity: int, start: int, take_number: Callable[[], int]
) -> tuple[Begin, End, Mark, Callable[[int], object], Callable[[int], tuple[int, int]]]:
    """Return the functions that write events into a ring that begins at `start`. [Note: the cost of an event]."""
    pack, now = EVENT.pack_into, time.monotonic_ns
    words = memoryview(memory).cast("q")
    mask, first_word = capacity - 1, start // 8
    step = 0

    def begin(kind: int, index: int, size: int, text: int) -> int:
        number = take_number()
        place = start + (number & mask) * EVENT_BYTES
        pack(memory, place, number + 1, now(), 0, kind | text << TEXT_SHIFT, step, index, size, number + 1)
        return number

    def end(number: int) -> None:
        word = first_word + (number & mask) * 8
        if words[word] == number + 1:  # else newer events have replaced it
            words[word + END_WORD] = now()

    def mark(kind: int, index: int, size: int, text: int) -> int:
        number, moment = take_number(), now()
        place = start + (number & mask) * EVENT_BYTES
        pack(memory, place, number + 1, moment, moment, kind | text << TEXT_SHIFT, step, index, size, number + 1)
        return number

    def set_step(value: int) -> None:
        nonlocal step
        step = value

    def moments(number: int) -> tuple[int, int]:
        word = first_word + (number & mask) * 8
        if words[word] != number + 1:
            return 0, 0
        return words[word + 1], words[word + END_WORD]

    return begin, end, mark, set_step, moments


NULL_WORKER_RECORDER: Final = WorkerRecorder()
"""A recorder that is never opened."""
