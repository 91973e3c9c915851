"""Waiting for signals, delaying and forwarding them, so that a launcher reacts to a signal at one place only.

Also: waiting for descriptors, and where the main thread of a worker stands.
"""

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, final

from lockstep.errors import WorkerFailedError
from lockstep.processes.host import stack_of_thread
from lockstep.processes.stop_signals import SAME_SECONDS, end_by_sigterm
from lockstep.processes.user_line import find_user_stack_line

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the launcher: Ctrl-C, `kill`, a closed terminal, Ctrl-backslash."""
_ROOM_BYTES = 4096
_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_WAITING = (
    f"{_OURS}comm{os.sep}",
    f"{_OURS}channel{os.sep}",
    f"{os.sep}torch{os.sep}distributed{os.sep}",
)
"""Whoever is in code of these folders waits for another worker, or will in a moment."""
_REDUCING = f"{_OURS}reduce{os.sep}"
"""The same, where it is the innermost code: a callback of the user's may be called from there."""
_RETURNED = "_wait_for_others"
"""The function of `worker.py` in which a worker is that makes no calls any more."""


@final
class SignalPipe:
    """A pipe into which the interpreter writes termination signals; main thread only.

    A signal that was ignored before stays ignored: a launch under nohup outlives its terminal. One that C code handles
    (`getsignal` returns None) stays its own, because Python could not give it back.
    """

    def __init__(self) -> None:
        self.source, self._written = os.pipe()
        self._undo = ExitStack()
        self._undo.callback(os.close, self.source)
        self._undo.callback(os.close, self._written)

    def __enter__(self) -> Self:
        os.set_blocking(self.source, False)
        os.set_blocking(self._written, False)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._written, warn_on_full_buffer=False))
        for number in TERMINATION_SIGNALS:  # whose handlers do nothing: the interpreter has written the number
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                self._undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        # Where the caller ignores it, the kernel tells nobody how a child has ended.
        if signal.getsignal(signal.SIGCHLD) is not None:
            self._undo.callback(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait up to `seconds` for a termination signal; return the first that has come, None without one."""
        numbers = os.read(self.source, _ROOM_BYTES) if wait_to_read(self.source, seconds=seconds) else b""
        return next((signal.Signals(number) for number in numbers if number in TERMINATION_SIGNALS), None)


def wait_to_read(*descriptors: int, seconds: float | None = None) -> set[int]:
    """Wait until a descriptor can be read or is at its end, and return those that are; none after `seconds`."""
    return _wait(descriptors, selectors.EVENT_READ, seconds)


def wait_to_write(descriptor: int) -> None:
    _wait((descriptor,), selectors.EVENT_WRITE, None)


def _wait(descriptors: tuple[int, ...], event: int, seconds: float | None) -> set[int]:
    # Not select(), which supports no descriptor above 1023, nor epoll(), which needs a descriptor itself.
    with selectors.PollSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, event)
        return {key.fd for key, _ in selector.select(seconds)}


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


@final
class SignalForwarding:
    """A context in which SIGTERM is forwarded, after `begin` was called. Workers must have ended when it exits.

    The launcher sends the first SIGTERM on to every worker. A worker without a handler ends by it; then the launcher
    ends by SIGTERM too. A worker with a handler that saves and stops returns from its function; then `launch` returns.
    A second SIGTERM, a second later or more, ends the launcher and all workers at once.

    It does nothing where the user has installed a handler, or outside the main thread.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._is_handling = False
        self._died_of_signal: Callable[[], bool] = lambda: False

    @property
    def is_requested(self) -> bool:
        return self._first is not None

    def begin(self, forward: Callable[[], None], died_of_signal: Callable[[], bool]) -> None:
        """Begin to forward SIGTERM: call `forward` in the signal handler, `died_of_signal` when all have ended."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def take(_number: int, _frame: object) -> None:
            if self._first is None:
                self._first = time.monotonic()
                forward()
            elif time.monotonic() - self._first > SAME_SECONDS:
                end_by_sigterm()

        self._died_of_signal = died_of_signal
        self._is_handling = True
        signal.signal(signal.SIGTERM, take)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End this process by SIGTERM too, if SIGTERM has ended workers."""
        if self._is_handling:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._first is not None and isinstance(error, WorkerFailedError) and self._died_of_signal():
            end_by_sigterm()


def look_at_main_thread() -> dict[str, Any]:
    """Return whether the main thread waits for other workers, None if that is not known, and its line (any thread).

    `place` is the user's line if there is one: "train.py, line 31, in loss".
    """
    stack = stack_of_thread(threading.main_thread().ident)
    if not stack:  # there are too many other threads
        return {"waits": None, "place": "a line that is not known"}
    waits = stack[0].file.startswith(_REDUCING) or any(
        line.function == _RETURNED or any(folder in line.file for folder in _WAITING) for line in stack
    )
    shown = find_user_stack_line(stack) or stack[0]
    return {"waits": waits, "place": f"{Path(shown.file).name}, line {shown.number}, in {shown.function}"}
