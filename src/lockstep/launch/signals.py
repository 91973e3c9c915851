"""Signals as things that can be waited for, so that a launcher reacts where it can and is interrupted nowhere."""

import os
import signal
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Self, final

from lockstep.launch.readiness import wait_to_read

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that ask the launcher to end: Ctrl-C, a polite kill, a closed terminal, Ctrl-backslash."""
_ROOM_BYTES = 4096


@final
class SignalMailbox:
    """Collects the signals that ask this process to end, and the news that a child has; main thread only.

    One that was ignored before stays so: a launch under nohup outlives its terminal.
    """

    def __init__(self) -> None:
        self._source, self._written = os.pipe()
        self._undo = ExitStack()
        self._undo.callback(os.close, self._source)
        self._undo.callback(os.close, self._written)

    def __enter__(self) -> Self:
        """Collect from here on."""
        os.set_blocking(self._source, False)
        os.set_blocking(self._written, False)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._written, warn_on_full_buffer=False))
        for number in (*STOPPING, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number is signal.SIGCHLD:
                self._undo.callback(signal.signal, number, signal.signal(number, _leave_to_mailbox))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back how signals were handled."""
        self._undo.close()

    def wait(self, seconds: float | None) -> signal.Signals | None:
        """Wait for a signal, at most so long; return the first that asks to end, if one has come."""
        ready = wait_to_read(self._source, seconds=seconds)
        numbers = os.read(self._source, _ROOM_BYTES) if ready else b""
        return next((signal.Signals(number) for number in numbers if number in STOPPING), None)


def _leave_to_mailbox(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number is written into the pipe by the interpreter."""
