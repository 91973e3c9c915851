"""Python stacks of the workers and of their loading processes, on request; and where a worker was when it crashed."""

import re
import signal
from pathlib import Path
from typing import Final

from lockstep.doctor.finding import read_header
from lockstep.doctor.system import look_at, thread_beside_frozen_main
from lockstep.processes.host import StackLine
from lockstep.processes.user_line import find_user_stack_line
from lockstep.recording.stacks import request_stacks

_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x")
_CUT: Final = "..."
"""The line that stands for all older threads."""
_ANSWER_SECONDS: Final = 3.0


_CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_FATAL: Final = "Fatal Python error: "
_CURRENT: Final = "Current thread 0x"


def read_main_stack(text: str) -> list[StackLine]:
    """Return the stack of the main thread, innermost frame first, from what faulthandler has written.

    It writes the threads from the newest to the oldest, which is the main thread; of more than 100 not the oldest ones.
    """
    frames: list[StackLine] = []
    for line in text.splitlines():
        if _THREAD.match(line) or line == _CUT:
            frames = []
        elif (match := _FRAME.match(line)) is not None:
            frames.append(StackLine(match["file"], int(match["line"].replace("?", "0")), match["function"]))
    return frames


def take_stack(path: Path, pid: int, number: int) -> str:
    """Return the Python stacks of a process; empty if it cannot be asked, or does not answer (local).

    `number` is the signal on which it writes them to `path`, its worker's file; 0 for none.
    Of a main thread in disk sleep another thread of the process writes it, if that is safe.
    """
    facts = look_at(pid)
    # The signal would end a process that has no handler, as one that a worker has started as another program.
    if number == 0 or facts is None or facts.is_stopped or not facts.catches >> (number - 1) & 1:
        return ""
    thread = None
    if facts.state == "in disk sleep" and facts.catches >> number & 1:
        thread = thread_beside_frozen_main(pid)
    if thread is not None:
        return request_stacks(path, pid, number + 1, _ANSWER_SECONDS, thread)
    return request_stacks(path, pid, number, _ANSWER_SECONDS)


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
    frame = find_user_stack_line(stack) or (stack[0] if stack else None)
    return "" if frame is None else str(frame)
