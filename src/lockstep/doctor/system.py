"""What the system knows of a process, without being root: as /proc shows it to the user who owns the process."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process at one moment."""

    state: str
    """In words: running, sleeping, stopped, in disk sleep, ..."""
    memory_bytes: int
    """What it has in memory."""
    swapped_bytes: int
    cpu_seconds: float
    """Time on cores since it began, of all threads."""
    num_threads: int
    call: str
    """The system call that its main thread is in, with the file if it has one; empty if it is in none, or not known."""
    catches: int
    """The signals for which it has handlers, as bits: signal N is bit N - 1."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, and runs no instruction until it is continued."""
        return self.state.startswith("stopped")


def look_at(pid: int) -> ProcessFacts | None:
    """Return what the system knows of a process; None if there is none, or it has ended (local)."""
    folder = Path(f"/proc/{pid}")
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return ProcessFacts(
        state=_STATES.get(stat[0], stat[0]),
        memory_bytes=_bytes(fields.get("VmRSS", "")),
        swapped_bytes=_bytes(fields.get("VmSwap", "")),
        cpu_seconds=(int(stat[11]) + int(stat[12])) / _TICKS_PER_SECOND,
        num_threads=int(stat[17]),
        call=_system_call(folder),
        catches=int(fields.get("SigCgt", "0"), 16),
    )


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run, the children of its children not among them."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text(encoding="ascii").split())
        except OSError:  # a thread that has ended
            continue
    return found


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
    """Return for how many nanoseconds the threads of a process have run."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[0])
        except OSError:  # a thread that has ended
            continue
    return total


def _switches(thread: Path) -> list[str]:
    try:
        lines = (thread / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if "ctxt_switches" in line]


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
    try:
        words = (folder / "syscall").read_text(encoding="ascii").split()
    except OSError:
        return []
    return words if words and words[0].isdecimal() else []
