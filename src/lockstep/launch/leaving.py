"""SIGTERM to one worker: it asks the launcher to let it leave after the step under way. The worker's side.

A machine that is taken back, or a colleague who needs the GPU, sends it to one process. Where the worker cannot leave,
because too few would be left or the launcher has got SIGTERM too, the signal does what it did before.

[Note: SIGTERM while native code runs] Python calls a handler only between two lines of Python. So a thread waits for
the byte that the interpreter writes as soon as the signal comes.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import final

from lockstep.channel.client import ChannelClosedError
from lockstep.comm.generations import Generations

_CHUNK_BYTES = 4096


@final
class LeaveRequest:
    """Asks the launcher once; if this worker cannot leave, calls `otherwise` in any thread (None: ends by SIGTERM)."""

    def __init__(self, generations: Generations, otherwise: Callable[[], None] | None = None) -> None:
        self.otherwise = otherwise or end_by_sigterm
        self._generations = generations
        self._changing = threading.Lock()
        self._has_asked = False
        self._is_refused = False
        generations.on_stay = self.refuse

    def ask(self) -> None:
        """Ask the launcher; after a refusal do what is done otherwise (any thread but one that handles a signal)."""
        with self._changing:
            is_first = not self._has_asked
            self._has_asked = True
            is_refused = self._is_refused
        if is_refused:
            self.otherwise()
        elif is_first:
            with contextlib.suppress(ChannelClosedError):  # the launcher has ended, and with it this process
                self._generations.report("leave")

    def ask_from_handler(self) -> None:
        """Do the same in a signal handler, which may have interrupted this thread while it held a lock."""
        threading.Thread(target=self.ask, name="asks to leave", daemon=True).start()

    def refuse(self) -> None:
        """Take in that this worker cannot leave, whether it has asked or not."""
        with self._changing:
            self._is_refused = True
            has_asked = self._has_asked
        if has_asked:
            self.otherwise()


def leave_on_sigterm(request: LeaveRequest) -> None:
    """Ask to leave when SIGTERM comes, unless something else handles it already (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before >= 0:  # an event loop of the user's: its byte stays its own
        signal.set_wakeup_fd(before)
        _handle_sigterm(lambda _number, _frame: request.ask_from_handler())
        return

    def ignore(_number: int, _frame: object) -> None:
        """Do nothing: the thread below has got the byte."""

    def wait() -> None:
        while numbers := os.read(reader, _CHUNK_BYTES):
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is ignore:
                request.ask()

    _handle_sigterm(ignore)
    threading.Thread(target=wait, name="waits for SIGTERM", daemon=True).start()


def _handle_sigterm(handler: Callable[[int, object], None]) -> None:
    """Set a handler until the interpreter shuts down: then it calls none any more, and SIGTERM would do nothing."""

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handler)
    atexit.register(undo)


def end_by_sigterm() -> None:
    """End this process by SIGTERM, from any thread; `signal.signal` works in the main thread only."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
