"""SIGTERM to a process that has launched workers: it is for them.

SIGTERM -> launcher -> every worker:   no handler of its own     ends of it; so does the launcher, as if alone
                                       one that saves and stops  returns in its own time; so does `launch`
a second one, a second later or more:  the launcher ends at once, and the workers with it
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
"""Signals that come so soon after the first are the same request: `timeout` and Slurm send several."""


@final
class HandingOn:
    """Hands SIGTERM on, once it is known to whom. Use it as a context, around what ends the workers.

    Where the user has a handler, or outside the main thread, nothing is done.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._is_handling = False
        self._have_ended_of_it: Callable[[], bool] = _no

    def begin(self, hand_on: Callable[[], None], have_ended_of_it: Callable[[], bool]) -> None:
        """Begin to hand SIGTERM on.

        Args:
            hand_on: Called with the first.
            have_ended_of_it: Whether workers have failed, and of nothing but that; asked when all are gone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def take(_number: int, _frame: object) -> None:
            if self._first is None:
                self._first = time.monotonic()
                hand_on()
            elif time.monotonic() - self._first > _SAME_SECONDS:
                _end()

        self._have_ended_of_it = have_ended_of_it
        self._is_handling = True
        signal.signal(signal.SIGTERM, take)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End of the signal, if workers have."""
        if self._is_handling:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._first is not None and isinstance(error, WorkerFailedError) and self._have_ended_of_it():
            _end()


def _no() -> bool:
    """Stand for workers that there are not yet."""
    return False


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
