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
from lockstep.processes.forking import call_in_children

_CHUNK_BYTES = 4096


@final
class LeaveRequest:
    """Asks the launcher once; if this worker cannot leave, calls `otherwise` in any thread (None: ends by SIGTERM).

    After a refusal SIGTERM ends the worker where `handles` says that the handler of this request is the present one:
    it may stand in native code that calls no handler.
    """

    def __init__(self, generations: Generations, otherwise: Callable[[], None] | None = None) -> None:
        self.otherwise = otherwise or end_by_sigterm
        self.handles: Callable[[], bool] = lambda: False
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
        if self.handles():
            _restore_default()
        if has_asked:
            self.otherwise()


def leave_on_sigterm(request: LeaveRequest) -> None:
    """Ask to leave when SIGTERM comes, unless something else handles it already (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handler = _Handler(request)
        signal.signal(signal.SIGTERM, handler)
        request.handles = handler.is_present
        atexit.register(handler.undo)
        call_in_children(handler.undo)


@final
class _Handler:
    """Asks to leave, and so does a thread, which needs no line of Python to end first.

    Code of the user's may take the thread's descriptor (asyncio does, and drops it again when its loop is closed), or
    call this from a handler of its own. A child that is forked has neither the handler nor the descriptor.
    """

    def __init__(self, request: LeaveRequest) -> None:
        self._request = request
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if before >= 0:  # an event loop of the user's: its byte stays its own
            signal.set_wakeup_fd(before)
        else:
            threading.Thread(target=self._wait, name="waits for SIGTERM", daemon=True).start()

    def __call__(self, _number: int, _frame: object) -> None:
        self._request.ask_from_handler()

    def is_present(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def undo(self) -> None:
        """Undo it in a child, and before the interpreter shuts down: then it calls no handler any more."""
        if self.is_present():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (current := signal.set_wakeup_fd(-1)) not in {self._writer, -1}:
            signal.set_wakeup_fd(current)

    def _wait(self) -> None:
        while numbers := os.read(self._reader, _CHUNK_BYTES):
            if signal.SIGTERM in numbers and self.is_present():
                self._request.ask()


def end_by_sigterm() -> None:
    """End this process by SIGTERM, from any thread; `signal.signal` works in the main thread only."""
    _restore_default()
    os.kill(os.getpid(), signal.SIGTERM)


def _restore_default() -> None:
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
