"""Python stacks of a worker in a file: of a living one on request, by a signal, and of one that crashes in native code.

`faulthandler` writes from a signal handler in C, so it works while the main thread is within a call of a library. A
process that is stopped writes when it continues.

On request the main thread writes its own stack. The frames of other threads change while a signal handler reads them,
and the process could crash. A main thread in disk sleep handles no signal, but its frames do not change: if nothing
else of the process runs, another thread may write the stacks of all, on the next signal.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

_OFFSET: Final = 7
"""The signal is SIGRTMIN + this: the first ones are used by C libraries."""
_POLL_SECONDS: Final = 0.02
_SETTLED_SECONDS: Final = 0.1
"""A file that has not grown for so long is complete."""
_FILES: Final[list[int]] = []
"""Descriptors to which faulthandler writes: they must stay open."""


def write_stacks_on_signal(path: Path) -> int:
    """Let this process write the Python stack of its main thread to a file when it gets a signal, or crashes (local).

    On the next signal it writes the stacks of all threads. Return the signal; 0 where there is none, or it is in use.
    """
    if sys.platform == "win32" or not hasattr(signal, "SIGRTMIN"):
        return 0
    number = int(signal.SIGRTMIN) + _OFFSET
    if signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
        if signal.getsignal(number + 1) is signal.SIG_DFL:
            faulthandler.register(number + 1, file=descriptor, all_threads=True, chain=False)
        if not faulthandler.is_enabled():  # else the user has chosen where the stacks of a crash go
            faulthandler.enable(descriptor)
    except (OSError, RuntimeError, ValueError):
        return 0
    _FILES.append(descriptor)
    return number


def request_stacks(path: Path, pid: int, number: int, seconds: float, thread: int | None = None) -> str:
    """Ask a process for its Python stacks; return them, or nothing if it does not answer (local).

    The process must have registered the signal: it ends any other. `thread` is the system's number, None for the main.
    """
    try:
        before = path.stat().st_size
        was_sent = _send(pid, pid if thread is None else thread, number)
    except OSError:
        return ""
    if not was_sent:
        return ""
    deadline = time.monotonic() + seconds
    size, settled = before, time.monotonic() + _SETTLED_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        found = path.stat().st_size
        if found != size:
            size, settled = found, time.monotonic() + _SETTLED_SECONDS
        elif size > before and time.monotonic() > settled:
            break
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _send(pid: int, thread: int, number: int) -> bool:
    """Send a signal to one thread: sent to the process, another one handles it where the main thread blocks it."""
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is not None:
        return bool(send(pid, thread, number) == 0)
    if thread != pid:  # a C library without it
        return False
    os.kill(pid, number)
    return True
