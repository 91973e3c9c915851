"""Says by itself why a job stands still: one message per job and host, some seconds after `LOCKSTEP_STALL_SECONDS`.

    thread of the launcher (without one of ours: of each worker)
    ------------------------------------------------------------
    1 reads when each worker has last begun or ended something, a few times in the stall time
    2 one has not for the stall time: examines the job, as `lockstep doctor` does
    3 the job stands still: logs the verdict, unless another process has logged it

It reads what the workers of this host record, and they notice nothing of it. Of workers on other hosts it says that
they are waited for, and tells the watches there through the store of the group; these say what their workers do.
"""

import fcntl
import logging
import mmap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from lockstep.doctor.finding import is_running
from lockstep.doctor.system import UsageEvents
from lockstep.processes.host import boot_id
from lockstep.recording import EventKind, WorkerRecorder, ensure_own_recorder, own_recorder
from lockstep.recording.file_format import (
    END_WORD,
    EVENT_BYTES,
    HEADER_BYTES,
    RING_START,
    FileHeader,
    file_bytes,
    parse_header,
)
from lockstep.settings import read_settings

if TYPE_CHECKING:
    from torch.distributed import Store

    from lockstep.doctor.diagnosis import Verdict
    from lockstep.doctor.examination import Examination

_LOGGER = logging.getLogger("lockstep")
_BEGIN_WORD: Final = 1
_LOOKS: Final = 8
"""So often in the stall time it looks, but not less often than each `_LONGEST_PAUSE`."""
_LONGEST_PAUSE: Final = 2.0
_PATIENCE: Final = 5
"""A job of which nobody waits for others, and which computes, may do so for this many times the stall time."""
_MOST_ASKS: Final = 20
"""So often a worker that did not show its stack in time is asked again, for a second message with its line."""
_TOLD: Final = "stalls"
"""The file that holds in which boot, and when, the last stall was logged."""


@final
class StallWatch:
    """Looks at a recording from a thread of its own, until `close`."""

    def __init__(
        self,
        recording: Path,
        seconds: float,
        recorder: WorkerRecorder,
        usage: UsageEvents | None = None,
        hosts: "StallsElsewhere | None" = None,
    ) -> None:
        self._recording = recording
        self._seconds = seconds
        self._recorder = recorder
        self._pause = min(seconds / _LOOKS, _LONGEST_PAUSE)
        self._usage = usage
        self._hosts = hosts
        self._waits_elsewhere = False
        self._seen: dict[Path, int] = {}
        self._own_marks: dict[int, int] = {}
        self._next_look = 0.0
        self._asks_left = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep stall watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            try:
                self._look()
                if self._usage is not None:
                    self._usage.look(self._recording)
            except OSError:  # the recording was removed while it was read
                continue

    def _look(self) -> None:
        silent = self._silent_workers()
        if not silent:
            self._seen, self._next_look, self._waits_elsewhere, self._asks_left = {}, 0.0, False, 0
            return
        if self._waits_elsewhere and self._hosts is not None:
            self._hosts.tell()
        if silent == self._seen and time.monotonic() < self._next_look:
            return
        is_new = silent != self._seen
        self._seen = silent
        self._asks_left = 0 if is_new else self._asks_left
        from lockstep.doctor.examination import examine

        found = examine(self._recording, stall_seconds=self._seconds)
        silence = (time.monotonic_ns() - max(silent.values())) / 1e9
        self._waits_elsewhere = found.verdict.is_elsewhere
        is_awaited = self._hosts is not None and self._hosts.was_told()
        if is_told(found.verdict, silence, self._seconds, is_awaited=is_awaited):
            self._tell(found, silent)
            self._next_look = time.monotonic() + self._pause if self._asks_left else float("inf")
        elif is_new or self._next_look < float("inf"):
            self._next_look = time.monotonic() + max(min(silence, self._seconds) / 4, self._pause)

    def _tell(self, found: "Examination", silent: dict[Path, int]) -> None:
        """Log the verdict; and once more when a worker that is the cause has shown its stack, if it did not in time."""
        has_stacks = found.late_stacks.isdisjoint(found.verdict.ranks)  # of the workers that are the cause
        is_told = self._asks_left > 0
        self._asks_left = 0 if has_stacks else self._asks_left - 1 if is_told else _MOST_ASKS
        if self._silent_workers() != silent or (is_told and not has_stacks):
            return
        if is_told or self._claim(max(silent.values())):
            self._mark(silent)
            _LOGGER.warning("%s", self._message(found.verdict))
        else:
            self._asks_left = 0

    def _mark(self, silent: Mapping[Path, int]) -> None:
        """Record that a stall is logged: in the file of a silent worker, where that watches itself."""
        self._recorder.mark(EventKind.STALL, 0, 0, 0)
        for path, moment in silent.items():
            seen = last_moment(path)
            if seen is not None and seen[1] != moment:
                self._own_marks = {seen[1]: moment}

    def _silent_workers(self) -> dict[Path, int]:
        """Return when the workers that have begun and ended nothing for the stall time did so last."""
        now, boot, found = time.monotonic_ns(), boot_id(), {}
        for path in self._recording.glob("worker-*.rec"):
            seen = last_moment(path)
            if seen is None:
                continue
            header, moment = seen
            moment = self._own_marks.get(moment, moment)
            is_silent = now - moment > self._seconds * 1e9
            if is_silent and not header.ended_ns and header.boot == boot and is_running(header):
                found[path] = moment
        return found

    def _claim(self, since_ns: int) -> bool:
        """Return whether no stall was logged in this boot since this one began; then this watch does."""
        boot = boot_id()
        with (self._recording / _TOLD).open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            told_in, _, last = file.read().rpartition(" ")
            if last and told_in == boot and int(last) > since_ns:
                return False
            file.truncate(0)
            file.write(f"{boot} {time.monotonic_ns()}")
        return True

    def _message(self, verdict: "Verdict") -> str:
        what, advice = "The job stands still.", verdict.advice
        if verdict.is_starting:
            what = "The job has not finished its first step."
            advice += " Imports, making data and models, and compiling may take long: then wait."
        return (
            f"{what} {verdict.text}\n{advice}\nMore: lockstep doctor {self._recording} --stacks "
            f"(logged after {self._seconds:g} s; LOCKSTEP_STALL_SECONDS changes that) (LS215)"
        )


def is_told(verdict: "Verdict", silence: float, stall_seconds: float, *, is_awaited: bool = False) -> bool:
    """Return whether a verdict is logged without being asked for; nothing has happened for `silence` seconds."""
    if verdict.kind != "stalled":
        return False
    return verdict.is_certain or is_awaited or silence > _PATIENCE * stall_seconds


@final
class StallsElsewhere:
    """Lets the watches of several hosts know of each other that workers wait for somebody on another host.

    While they do, their watch adds to a number in the store again and again. So no clocks are compared, and what was
    told of an earlier stall does not count.
    """

    def __init__(self, store: "Store") -> None:
        from torch.distributed import PrefixStore  # not above: the launcher of scripts does not import torch

        self._store = PrefixStore("lockstep stalls", store)
        self._number: int | None = None
        self._own = 0

    def tell(self) -> None:
        self._add(1)
        self._own += 1

    def was_told(self) -> bool:
        """Return whether a watch of another host has said so since the last call."""
        number = self._add(0)
        if number is None:
            return False
        before, self._number = self._number, number - self._own
        return before is not None and self._number > before

    def _add(self, number: int) -> int | None:
        try:
            return self._store.add("waits", number)
        except RuntimeError:  # the store is gone, as at the end of rank 0
            return None


def record_this_worker(rank: int, world_size: int, store: "Store | None" = None) -> None:
    """Record what this process does, if nothing else has begun to; without our launcher watch for stalls (local)."""
    recorder = own_recorder()
    has_begun = ensure_own_recorder(rank, world_size)
    seconds = read_settings().stall_seconds()
    if has_begun and world_size > 1 and seconds > 0 and recorder.directory is not None:
        hosts = None if store is None else StallsElsewhere(store)
        StallWatch(recorder.directory, seconds, recorder, hosts=hosts)


def last_moment(path: Path) -> tuple[FileHeader, int] | None:
    """Return who wrote a file, and when it has last begun or ended an event, in nanoseconds of its clock (local).

    None if it is not a file of a recording, or is being made. Read often, so without NumPy and without a copy.
    """
    with path.open("rb") as file:
        try:
            header = parse_header(file.read(HEADER_BYTES))
            memory = mmap.mmap(file.fileno(), file_bytes(header.capacity), access=mmap.ACCESS_READ)
        except ValueError:
            return None
    with memory, memoryview(memory) as data, data[RING_START:].cast("q") as words:
        moments = [max(words[word :: EVENT_BYTES // 8]) for word in (_BEGIN_WORD, END_WORD)]
    return header, max(*moments, header.opened_ns)
