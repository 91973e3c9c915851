"""Waiting for signals, and delaying them, so that a launcher reacts to a signal at one place only."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Self, final

from lockstep.launch.readiness import wait_to_read

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the launcher: Ctrl-C, `kill`, a closed terminal, Ctrl-backslash."""
_ROOM_BYTES = 4096


@final
class SignalPipe:
    """A pipe into which the interpreter writes termination signals and SIGCHLD; main thread only.

    A signal that was ignored before stays ignored: a launch under nohup outlives its terminal.
    """

    def __init__(self) -> None:
        self._source, self._written = os.pipe()
        self._undo = ExitStack()
        self._undo.callback(os.close, self._source)
        self._undo.callback(os.close, self._written)

    def __enter__(self) -> Self:
        """Collect signals from now on."""
        os.set_blocking(self._source, False)
        os.set_blocking(self._written, False)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._written, warn_on_full_buffer=False))
        for number in (*TERMINATION_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number is signal.SIGCHLD:
                self._undo.callback(signal.signal, number, signal.signal(number, _do_nothing))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back how signals were handled."""
        self._undo.close()

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait up to `seconds` for a signal; return the first termination signal, if one has come."""
        ready = wait_to_read(self._source, seconds=seconds)
        numbers = os.read(self._source, _ROOM_BYTES) if ready else b""
        return next((signal.Signals(number) for number in numbers if number in TERMINATION_SIGNALS), None)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number into the pipe."""


@contextlib.contextmanager
def sigint_held_back() -> Iterator[None]:
    """Delay Ctrl-C: for this process until the end of the block, for a child until it ignores the signal.

    The child inherits this thread's mask. The mask alone does not protect a process that has other threads: the kernel
    gives them the signal, and Python raises KeyboardInterrupt in this one. Hence the handler.
    """
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread runs Python's handlers and may set them. None means a handler that C code has installed.
    has_handler = threading.current_thread() is threading.main_thread() and handler is not None
    if has_handler:
        signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if has_handler:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def signals_blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in a child, which inherits the mask, until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
