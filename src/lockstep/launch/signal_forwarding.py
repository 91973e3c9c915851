"""Forwarding SIGTERM from a process that has launched workers to the workers.

The launcher sends the first SIGTERM on to every worker. A worker without a handler ends by it; then the launcher ends
by SIGTERM too. A worker with a handler that saves and stops returns from its function; then `launch` returns. A second
SIGTERM, a second later or more, ends the launcher and all workers at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, final

from lockstep.errors import WorkerFailedError

_SAME_SECONDS = 1.0
"""Signals within this time after the first are the same request: `timeout` and Slurm send several."""


@final
class SignalForwarding:
    """A context in which SIGTERM is forwarded, after `begin` was called. Workers must have ended when it exits.

    It does nothing where the user has installed a handler, or outside the main thread.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._is_handling = False
        self._died_of_signal: Callable[[], bool] = _never

    @property
    def is_requested(self) -> bool:
        """Whether SIGTERM has come."""
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
            elif time.monotonic() - self._first > _SAME_SECONDS:
                _end()

        self._died_of_signal = died_of_signal
        self._is_handling = True
        signal.signal(signal.SIGTERM, take)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End this process by SIGTERM too, if SIGTERM has ended workers."""
        if self._is_handling:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._first is not None and isinstance(error, WorkerFailedError) and self._died_of_signal():
            _end()


def _never() -> bool:
    return False


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
