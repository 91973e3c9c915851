"""What the system knows of processes, without being root: as /proc shows it to the user who owns them.

Of a worker: its state, and sums of what it has used. Of others: who takes the cores of this machine.
"""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import psutil

from lockstep.doctor.finding import is_running, read_headers
from lockstep.processes.host import boot_id
from lockstep.recording import EventKind, WorkerRecorder

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in disk sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, not collected by its parent",
    "X": "ended",
    "I": "idle",
}
_X86_64: Final = (
    *((0, "read"), (1, "write"), (7, "poll"), (17, "read"), (18, "write"), (23, "select"), (35, "sleep")),
    *((45, "receive"), (47, "receive"), (61, "wait for a child"), (72, "lock"), (73, "lock"), (74, "fsync")),
    *((75, "fsync"), (202, "futex"), (230, "sleep"), (232, "poll"), (247, "wait for a child"), (270, "select")),
    *((271, "poll"), (281, "poll"), (2, "open"), (257, "open")),
)
_AARCH64: Final = (
    *((22, "poll"), (32, "lock"), (63, "read"), (64, "write"), (72, "select"), (73, "poll"), (82, "fsync")),
    *((83, "fsync"), (98, "futex"), (101, "sleep"), (115, "sleep"), (207, "receive"), (212, "receive")),
    (260, "wait for a child"),
    (56, "open"),
)
_CALLS: Final = {"x86_64": dict(_X86_64), "aarch64": dict(_AARCH64)}
"""The system calls in which processes stay long, by the numbers of each architecture."""
_ON_A_FILE: Final = {"read", "write", "fsync", "lock", "receive"}
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS: Final = 0.2
_AT_REST: Final = 0.01
"""A process that uses less of a core does nothing; a thread that waits for the GIL looks again and again, for less."""
_MAY_BE_INTERRUPTED: Final = {"futex", "read"}
"""System calls that go on after a signal handler by themselves."""
_FEWEST_CORES: Final = 0.5
"""With less than this together neighbours are not mentioned."""
_LEAST: Final = 0.1
"""A process that uses less of a core is no neighbour."""
_MOST_NAMES: Final = 3
_TICK_NS: Final = 1_000_000_000 // _TICKS_PER_SECOND
_LONGEST_PAUSE: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    state: str
    """In words: running, sleeping, stopped, in disk sleep, ..."""
    memory_bytes: int
    swapped_bytes: int
    cpu_seconds: float
    """Time on cores since it began, of all threads."""
    call: str
    """The system call that its main thread is in, with the file if it has one; empty if it is in none, or not known."""
    catches: int
    """The signals for which it has handlers, as bits: signal N is bit N - 1."""

    @property
    def is_stopped(self) -> bool:
        return self.state.startswith("stopped")


def look_at(pid: int) -> ProcessFacts | None:
    """Return what the system knows of a process; None if there is none, or it has ended (local)."""
    folder = Path(f"/proc/{pid}")
    stat, status = _read(folder / "stat").rpartition(")")[2].split(), _read(folder / "status")
    if not stat or not status:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return ProcessFacts(
        state=_STATES.get(stat[0], stat[0]),
        memory_bytes=_bytes(fields.get("VmRSS", "")),
        swapped_bytes=_bytes(fields.get("VmSwap", "")),
        cpu_seconds=(int(stat[11]) + int(stat[12])) / _TICKS_PER_SECOND,
        call=_system_call(folder),
        catches=int(fields.get("SigCgt", "0"), 16),
    )


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run, the children of its children not among them."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _read(path).split()]


def thread_beside_frozen_main(pid: int) -> int | None:
    """Return a thread that may read the frames of the main one, which sleeps on and on in the kernel (local).

    None if the main thread ran in the meantime, if another one did and so changes its own frames, or if there is none
    that a signal does not disturb.
    """
    main = Path(f"/proc/{pid}/task/{pid}")
    before, switches = _core_ns(pid), _switches(main)
    time.sleep(_LOOK_SECONDS)
    used, facts = _core_ns(pid) - before, look_at(pid)
    is_frozen = facts is not None and facts.state == "in disk sleep" and _switches(main) == switches
    if not is_frozen or used > _LOOK_SECONDS * 1e9 * _AT_REST:
        return None
    threads = sorted(each for each in main.parent.iterdir() if each != main)
    return next((int(each.name) for each in threads if _call_name(_call_words(each)) in _MAY_BE_INTERRUPTED), None)


def _core_ns(pid: int) -> int:
    words = (_read(path).split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(each[0]) for each in words if each)  # empty: a thread that has ended


def _switches(thread: Path) -> list[str]:
    return [line for line in _read(thread / "status").splitlines() if "ctxt_switches" in line]


def _bytes(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024 if text.strip() else 0


def _system_call(folder: Path) -> str:
    """Return the system call of the main thread; only the user who may trace the process may read it."""
    words = _call_words(folder)
    name = _call_name(words)
    if name not in _ON_A_FILE or len(words) < 2:  # noqa: PLR2004 - the number, and its first argument
        return name
    descriptor = int(words[1], 16)
    try:
        target = os.readlink(folder / "fd" / str(descriptor))  # noqa: PTH115 - it may be no path
    except OSError:
        return name
    if name == "read" and (descriptor == 0 or target.startswith(("/dev/pts/", "/dev/tty"))):
        return "read of its input"
    return f"{name} of {target}"


def _call_name(words: Sequence[str]) -> str:
    return _CALLS.get(platform.machine(), {}).get(int(words[0]), "") if words else ""


def _call_words(folder: Path) -> list[str]:
    """Return the number of the system call that a thread is in, and its arguments; empty if it is in none."""
    words = _read(folder / "syscall").split()
    return words if words and words[0].isdecimal() else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A process that is not of the job: of another one, or of another user."""

    pid: int
    user: str
    program: str
    cores: float


def watch_processes() -> list[psutil.Process]:
    """Return the processes of this machine; what they use of cores is counted from now on (local)."""
    return list(psutil.process_iter(["cpu_percent"]))


def find_neighbours(watched: Sequence[psutil.Process], job: set[int]) -> list[Neighbour]:
    """Return the processes outside a job that have used cores since they are watched, the busiest first (local).

    What the processes of `job` have started is of the job too.
    """
    found = []
    for process in watched:
        with suppress(psutil.Error):  # it has ended, or this user may not see it
            cores = process.cpu_percent() / 100
            if cores >= _LEAST and job.isdisjoint({process.pid, *(each.pid for each in process.parents())}):
                user, program = process.username(), process.name()
                found.append(Neighbour(pid=process.pid, user=user, program=program, cores=cores))
    return sorted(found, key=lambda each: -each.cores)


def describe_neighbours(neighbours: Sequence[Neighbour], num_cores: int) -> str:
    """Return a line on what other processes use; empty if that is little."""
    total = sum(each.cores for each in neighbours)
    if total < _FEWEST_CORES:
        return ""
    named = [f"{each.program} (process {each.pid} of {each.user}) {each.cores:.1f}" for each in neighbours]
    more = f", and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    return (
        f"Other processes on this machine use {total:.1f} of its {num_cores} cores: "
        f"{', '.join(named[:_MOST_NAMES])}{more}."
    )


@final
class UsageEvents:
    """Records what the workers of this host use, in the stall watch: soon after they begin, then every ten seconds."""

    def __init__(self, recorder: WorkerRecorder) -> None:
        self._recorder = recorder
        self._next = self._pause = 0.0

    def look(self, recording: Path) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        boot, has_workers = boot_id(), False
        for header in read_headers(recording):
            if header.worker >= 0 and header.boot == boot and not header.ended_ns and is_running(header):
                has_workers = True
                for name, value in read_usage(header.pid).items():
                    self._recorder.mark(EventKind.USAGE, header.pid, value, self._recorder.text(name))
        self._pause = min(self._pause + has_workers, _LONGEST_PAUSE)
        self._next = now + self._pause


def read_usage(pid: int) -> dict[str, int]:
    """Return what a process has used and does now, as far as the system tells; empty if it has ended (local).

    What grows, so that the difference of two looks says why a worker is slow: time on cores (`cpu_ns`), time in which
    it could have run and another one had the core (`core_wait_ns`), in which its control group might not run
    (`throttled_ns`), and of waiting for the disk (`disk_wait_ns`); pages and bytes read from disk; switches that it
    wanted, and that it did not (`forced_switches`). Of now: bytes in memory and in the swap space, whether it is
    stopped or in disk sleep, threads that run or wait for a core (`num_running`), and cores.
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
