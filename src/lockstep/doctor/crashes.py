"""Where a worker was when it crashed in native code."""

import signal
from pathlib import Path
from typing import Final

from lockstep.doctor.finding import read_header
from lockstep.doctor.stacks import read_main_stack, user_frame

_CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_FATAL: Final = "Fatal Python error: "
_CURRENT: Final = "Current thread 0x"


def crash_place(recording: Path | None, pid: int, exit_code: int) -> str:
    """Return the user's line at which signal -`exit_code`, as SIGSEGV, ended a worker; empty if not known (local)."""
    if recording is None or -exit_code not in _CRASHES:
        return ""
    for path in recording.glob("*.rec"):
        header = read_header(path)
        if header is not None and header.pid == pid:
            return _place(path.with_suffix(".stacks"))
    return ""


def _place(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    crash = text.rpartition(_FATAL)[2] if _FATAL in text else ""
    _, marker, current = crash.partition(_CURRENT)
    stack = read_main_stack((marker + current).partition("\n\n")[0])
    frame = user_frame(stack) or (stack[0] if stack else None)
    return "" if frame is None else str(frame)
