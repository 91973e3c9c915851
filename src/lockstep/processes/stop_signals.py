"""Being asked to stop: by SIGTERM, or by SIGUSR1, which Slurm sends ahead of the end where it is told to.

A request takes effect between two steps, so that the state can be saved. The first SIGTERM is a request, and so is any
SIGUSR1; the second SIGTERM ends the process at once.

[Note: one request, several signals] `timeout` signals a process and then its group, Slurm and systemd signal every
process of a job while launchers hand the signal on, so one request may come as several signals. Those that follow the
first within a second are taken for the same.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that are requests."""
FORWARDED_SIGNAL = signal.SIGUSR1
"""What a launcher hands a request on to its workers with: however often it comes, it ends nothing."""

_SAME_SECONDS = 1.0


@final
class StopRequest:
    """Whether somebody has asked this process to stop, and who wants to hear of it."""

    def __init__(self) -> None:
        self.is_made = False
        self._listeners: list[Callable[[], None]] = []

    def make(self) -> None:
        """Ask; once is as good as twice."""
        if not self.is_made:
            self.is_made = True
            for listener in self._listeners:
                listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the request is made, which may be between any two lines of the main thread; or now."""
        self._listeners.append(listener)
        if self.is_made:
            listener()


@contextmanager
def stop_signals_handled(request: StopRequest) -> Iterator[None]:
    """Take the signals that ask to stop as a request meanwhile."""
    undo = handle_stop_signals(request)
    try:
        yield
    finally:
        undo()


def ignore_stop_signals() -> None:
    """Ignore the signals that ask to stop from here to the end of the process, which has stopped.

    torchrun ends the others when the first worker has ended. Python puts its own handlers away before it is gone, but
    not that a signal is ignored: so who takes a little longer still ends with its own exit code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def handle_stop_signals(request: StopRequest, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Take the signals that ask to stop as a request from here on, also one that was blocked so far; return the undo.

    A signal that was ignored before stays so. Outside the main thread, which alone may set handlers, nothing is done.

    Args:
        request: What is made.
        clock: Tells seconds. [Note: one request, several signals].
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    first: list[float] = []

    def take(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            if first and clock() - first[0] > _SAME_SECONDS:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            elif not first:
                first.append(clock())
        request.make()

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = [number for number, handler in before.items() if handler not in {signal.SIG_IGN, None}]
    for number in handled:
        signal.signal(number, take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def undo() -> None:
        for number in handled:
            signal.signal(number, before[number])

    return undo
