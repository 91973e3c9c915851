"""Writing a recording: the events of this process, and the files and folders that they are in.

[Note: the cost of an event] About 0.3 us: one `struct.pack_into` on the mapped file, with the clock and the next number
fetched in the same expression. Writing the eight words one by one, or through NumPy, takes longer. The functions are
closures: reading an attribute of `self` for each of six values would double the time. `benchmarks/recorder.py` measures
it. Under the GIL one `pack_into` is not interrupted by other threads, and `next` of a counter gives each event a number
of its own, so threads need no lock.

[Note: one clock] What moves shards to faster workers, `_get_ddp_logging_data`, the wait that others are told of, the
progress line and the speed of an epoch have the clock of the recorder; where they measure a part of a step, they read
its event. So a part of a step is measured in one place, and these numbers, the report and the doctor agree.
"""

import atexit
import itertools
import mmap
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from lockstep.processes.forking import call_at_exit_here, call_in_children
from lockstep.processes.host import boot_id, start_ticks
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
    parse_header,
)
from lockstep.recording.stacks import write_stacks_on_signal
from lockstep.settings import read_settings

NO_EVENT: Final = 0
LAUNCHER: Final = -1
"""The number of the launcher in place of a worker's."""
Begin = Callable[[int, int, int, int], int]
"""`begin(kind, index, size, text)`: an event begins; returns its number, for `end`."""
Mark = Callable[[int, int, int, int], int]
"""`mark(kind, index, size, text)`: an event without a duration, or which lasts until the next of its kind."""
End = Callable[[int], object]
"""`end(number)`: the event ends."""
_MODE: Final = 0o600
_NUM_KEPT: Final = 20
"""So many recordings of jobs without a run directory are kept."""
_NO_TEXT: Final = 0
_NUM_IN_MEMORY: Final = 4096
"""So many events are kept where there is no file."""
_NUM_FILES: Final = 8
"""So many files of one worker are kept, where a run is resumed again and again."""


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


def open_recorder(
    recorder: WorkerRecorder,
    directory: Path,
    *,
    worker: int,
    rank: int,
    world_size: int,
    capacity: int,
) -> bool:
    """Let a recorder write to a new file of a recording; return whether that is possible (local).

    A recording is no reason to end a training: where a file cannot be made, nothing is recorded. `worker` is `LAUNCHER`
    for the launcher; `capacity` is a power of two.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _free_path(directory, "launcher" if worker == LAUNCHER else f"worker-{worker}")
        header = FileHeader(
            capacity=capacity,
            pid=os.getpid(),
            stack_signal=0 if worker == LAUNCHER else write_stacks_on_signal(path.with_suffix(".stacks")),
            start_ticks=start_ticks(os.getpid()),
            worker=worker,
            opened_wall_ns=time.time_ns(),
            opened_ns=time.monotonic_ns(),
            host=socket.gethostname(),
            program=Path(sys.argv[0]).name if sys.argv else "",
            boot=boot_id(),
            rank=rank,
            world_size=world_size,
        )
        recorder.open(path, header)
    except OSError:
        return False
    return True


def _free_path(directory: Path, name: str) -> Path:
    """Return the path of a new file; a worker that is started again, or resumed, leaves the file of the one before."""
    paths = [directory / f"{name}.rec", *(directory / f"{name}.{number}.rec" for number in range(2, _NUM_FILES + 1))]
    for path in paths:
        if not path.exists():
            return path
    oldest = min(paths, key=lambda each: each.stat().st_mtime)
    oldest.unlink()
    return oldest


_OWN: Final = WorkerRecorder()


def own_recorder() -> WorkerRecorder:
    """Return the recorder of this process.

    [Note: one recorder per process] Groups are made by torch, which passes them what it knows, and a reducer may be
    used by a script that never heard of a recording. So there is one recorder per process, which all of them get here,
    once, when they are made. It keeps events in memory until a launcher, a worker or `init_process_group` opens it.
    """
    return _OWN


def ensure_own_recorder(rank: int, world_size: int) -> bool:
    """Record what this process does, if nothing else has begun to and the user allows it (local).

    The recording is where the launcher wants it, or in the private folder. Return whether it has begun in the latter.
    """
    if _OWN.is_open:
        return False
    settings = read_settings().recording()
    if not settings.is_wanted:
        return False
    try:
        directory = Path(settings.directory) if settings.directory else make_private_recording(_job_name())
    except OSError:
        return False
    is_open = open_recorder(_OWN, directory, worker=rank, rank=rank, world_size=world_size, capacity=settings.capacity)
    has_begun = is_open and not settings.directory
    if has_begun:
        call_at_exit_here(remove_oldest)  # not now: removing files takes longer than wrapping a model
    if has_begun and not settings.is_kept:
        call_at_exit_here(_remove, directory)
    return has_begun


def _remove(directory: Path) -> None:
    """Remove the recording if this is the last worker that writes to it."""
    if _OWN.directory == directory:  # else the recording was closed before
        _OWN.close()
        remove_if_over(directory)


def new_recording(wanted: Path | None) -> Path | None:
    """Return where a launcher's workers record; None if the user wants no recording, or there is no place (local).

    One that is not kept is in the private folder, whatever is wanted.
    """
    settings = read_settings().recording()
    if not settings.is_wanted:
        return None
    if wanted is not None and settings.is_kept:
        return wanted
    try:
        recording = make_private_recording()
        remove_oldest()
    except OSError:
        return None
    return recording


def _job_name() -> str:
    """Return a name that the workers of one job on this host have in common: they have one parent and one port.

    Empty for a process by itself.
    """
    variables = read_settings().launchers()
    if "MASTER_PORT" not in variables:
        return ""
    return f"port{variables['MASTER_PORT']}-{os.getppid()}"


def make_file(path: Path, size: int) -> mmap.mmap:
    """Make a file of `size` bytes, all zero, and map it; `OSError` if it exists, or there is no space.

    Its blocks are allocated now: on a full disk, writing to a page of a file without blocks ends the process (SIGBUS).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def private_folder() -> Path:
    """Return the folder with the recordings of jobs without a run directory; made if it is not there.

    `OSError`: it cannot be made, or belongs to another user, who could read or replace what is written there.
    """
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone.")
    return folder


def make_private_recording(name: str = "") -> Path:
    """Return a folder for the recording of a job; several processes may call.

    The name ends in `-` and the process that started the job: while that runs, the recording is not removed. Without a
    name the folder is a new one: who removes it removes nothing of another launch of the same second.
    """
    folder = private_folder()
    if name:
        recording = folder / name
        recording.mkdir(mode=0o700, exist_ok=True)
    else:
        recording = _make_new(folder)
    return recording


def remove_oldest() -> None:
    """Remove the recordings of jobs that are over, but for the newest (local)."""
    with suppress(OSError):  # another user's folder
        for old in sorted(private_folder().iterdir(), key=_made_at, reverse=True)[_NUM_KEPT:]:
            starter = old.name.rpartition("-")[2]
            if not Path(f"/proc/{starter}").exists():
                shutil.rmtree(old, ignore_errors=True)


def _make_new(folder: Path) -> Path:
    moment, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while True:
        recording = folder / f"{moment}{f'.{number}' if number > 1 else ''}-{os.getpid()}"
        try:
            recording.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return recording


def remove_if_over(recording: Path) -> None:
    """Remove a recording if none of the processes that write to it runs (local)."""
    try:
        headers = [parse_header(path.read_bytes()) for path in recording.glob("*.rec")]
    except (OSError, ValueError):  # another process removes it, or begins to write
        return
    if all(each.ended_ns or start_ticks(each.pid) != each.start_ticks for each in headers):
        shutil.rmtree(recording, ignore_errors=True)


def _made_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _begin_under_launcher() -> None:
    """Record from the import of Lockstep on, if a launcher of ours wants it: the script may hang before its group."""
    settings = read_settings()
    variables = settings.launchers()
    rank, world_size = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
    if settings.recording().directory and rank.isdecimal() and world_size.isdecimal():
        ensure_own_recorder(int(rank), int(world_size))


call_in_children(_OWN.forget)
_begin_under_launcher()
atexit.register(_OWN.close)
