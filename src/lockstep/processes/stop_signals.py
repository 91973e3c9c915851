"""Handling SIGTERM and SIGUSR1 as requests to save and stop. Slurm can send SIGUSR1 some time before a job's limit.

A request takes effect between two steps, so that the state can be saved. The first SIGTERM is a request, and so is
every SIGUSR1; a second SIGTERM ends the process at once.

[Note: one request, several signals] One request may come as several signals: `timeout` signals a process and then its
group; Slurm and systemd signal every process of a job, and the launcher forwards the signal too. So a SIGTERM within a
second of the first counts as the same request.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from lockstep.processes.forking import call_in_children

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FORWARDED_SIGNAL = signal.SIGUSR1
"""The signal with which a launcher forwards a request to its workers. Repeated signals do not end a worker."""

SAME_SECONDS = 1.0


@final
class StopRequest:
    def __init__(self) -> None:
        self.is_made = False
        self._listeners: list[Callable[[], None]] = []

    def make(self) -> None:
        if not self.is_made:
            self.is_made = True
            for listener in self._listeners:
                listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the request is made: in a signal handler, or now if it was made already."""
        self._listeners.append(listener)
        if self.is_made:
            listener()


def let_sigterm_end() -> None:
    """Give SIGTERM its default action, from any thread; `signal.signal` works in the main thread only."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def end_by_sigterm() -> None:
    let_sigterm_end()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_signals_handled(request: StopRequest) -> Iterator[None]:
    undo = handle_stop_signals(request)
    try:
        yield
    finally:
        undo()


def ignore_stop_signals() -> None:
    """Ignore stop signals until the process ends, because its training has stopped already.

    torchrun sends SIGTERM to the other workers when the first has exited. While the interpreter shuts down it removes
    its handlers, but a signal that is ignored stays ignored, so a slower worker still exits with its own exit code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def handle_stop_signals(request: StopRequest, on_sigterm: Callable[[], None] | None = None) -> Callable[[], None]:
    """Handle stop signals as a request from now on, and unblock them; return a function that restores the handlers.

    A signal that was ignored before stays ignored. This does nothing outside the main thread, because only the main
    thread may set handlers. `on_sigterm` is called in the signal handler, instead of making the request. A child that
    is forked has the former handlers: `Process.terminate` ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    first: list[float] = []

    def take(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            if first and time.monotonic() - first[0] > SAME_SECONDS:
                end_by_sigterm()
            elif not first:
                first.append(time.monotonic())
            if on_sigterm is not None:
                on_sigterm()
                return
        request.make()

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = [number for number, handler in before.items() if handler not in {signal.SIG_IGN, None}]
    for number in handled:
        signal.signal(number, take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def undo() -> None:
        for number in filter(lambda each: signal.getsignal(each) is take, handled):
            signal.signal(number, before[number])

    call_in_children(undo)
    return undo
