"""What a process has used since it began, by name: sums that only grow, and what is so at this moment.

The thread that watches for stalls records them for each worker; the difference of two says why a worker is slow.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from lockstep.doctor.finding import is_running, read_headers
from lockstep.doctor.system import look_at
from lockstep.processes.host import boot_id
from lockstep.recording import EventKind, WorkerRecorder

_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
GROWING: Final = (
    *("cpu_ns", "core_wait_ns", "throttled_ns", "switches", "forced_switches", "major_faults", "read_bytes"),
    "disk_wait_ns",
)
"""Time on cores; time in which it could have run and another one had the core; time in which its control group might
not run; switches that it wanted (waits), and that it did not; pages read from disk; bytes read; waits for the disk."""
PRESENT: Final = ("memory_bytes", "swapped_bytes", "is_stopped", "is_in_disk_sleep", "num_running", "num_cores")
"""In memory; in the swap space; whether it is stopped, or in disk sleep; threads that run or wait for a core; cores."""


_LONGEST_PAUSE: Final = 10.0


@final
class UsageEvents:
    """Records what the workers of this host use: soon after they begin, and then every ten seconds."""

    def __init__(self, recorder: WorkerRecorder) -> None:
        self._recorder = recorder
        self._next = self._pause = 0.0

    def look(self, recording: Path) -> None:
        """Record it, if it is time for that (local)."""
        now = time.monotonic()
        if now < self._next:
            return
        boot = boot_id()
        for header in read_headers(recording):
            if header.worker >= 0 and header.boot == boot and not header.ended_ns and is_running(header):
                for name, value in read_usage(header.pid).items():
                    self._recorder.mark(EventKind.USAGE, header.pid, value, self._recorder.text(name))
                self._pause = min(self._pause + 1.0, _LONGEST_PAUSE)
        self._next = now + self._pause


def read_usage(pid: int) -> dict[str, int]:
    """Return what a process has used and does now, by the names of `GROWING` and `PRESENT`; empty if it has ended.

    What the system does not tell is left out (local).
    """
    facts = look_at(pid)
    if facts is None:
        return {}
    folder = Path(f"/proc/{pid}")
    found = {
        "cpu_ns": round(facts.cpu_seconds * 1e9),
        "memory_bytes": facts.memory_bytes,
        "swapped_bytes": facts.swapped_bytes,
        "is_stopped": int(facts.is_stopped),
        "is_in_disk_sleep": int(facts.state == "in disk sleep"),
    }
    stat = _read(folder / "stat").rpartition(")")[2].split()
    if stat:
        found |= {"major_faults": int(stat[9]), "disk_wait_ns": int(stat[39]) * _TICK_NS}
    found |= _of_threads(folder / "task")
    io = _fields(_read(folder / "io"), ":")
    found |= {"read_bytes": io["read_bytes"]} if "read_bytes" in io else {}
    found |= _throttled(_read(folder / "cgroup"))
    try:
        found["num_cores"] = len(os.sched_getaffinity(pid))
    except OSError:
        return {}
    return found


def _of_threads(folder: Path) -> dict[str, int]:
    """Return the sums over the threads of a process of the time for which they waited for a core, and of switches."""
    sums = dict.fromkeys(("core_wait_ns", "switches", "forced_switches", "num_running"), 0)
    try:
        threads = list(folder.iterdir())
    except OSError:
        return {}
    for thread in threads:
        words = _read(thread / "schedstat").split()
        status = _read(thread / "status")
        fields = _fields(status, ":")
        sums["core_wait_ns"] += int(words[1]) if len(words) > 1 else 0
        sums["switches"] += fields.get("voluntary_ctxt_switches", 0)
        sums["forced_switches"] += fields.get("nonvoluntary_ctxt_switches", 0)
        sums["num_running"] += "State:\tR" in status
    return sums


def _throttled(groups: str) -> dict[str, int]:
    """Return for how long a limit of its control group, or of one above, has kept a process from its cores."""
    root = Path("/sys/fs/cgroup")
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        base = root / "cpu" if names else root
        fields = _fields(_read(base / path.lstrip("/") / "cpu.stat"), " ")
        if "throttled_usec" in fields:
            return {"throttled_ns": fields["throttled_usec"] * 1000}
        if "throttled_time" in fields:
            return {"throttled_ns": fields["throttled_time"]}
    return {}


def _fields(text: str, separator: str) -> Mapping[str, int]:
    """Return the lines `name separator number` of a text."""
    pairs = (line.split(separator, 1) for line in text.splitlines() if separator in line)
    return {name.strip(): int(words[0]) for name, value in pairs if (words := value.split()) and words[0].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or this user may not read it
        return ""
