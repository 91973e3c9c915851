"""The collectives of a backend of torch that have not ended: until then they may write into their tensors."""

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final, final

from torch.distributed import Work

from lockstep.processes.ending import start_thread_left_alone

_END_SECONDS: Final = 5.0
"""How long a collective may take to end whose connections are closed: milliseconds, unless it hangs."""
_POLL_SECONDS: Final = 0.001


@final
class CallsUnderWay:
    """The collectives of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[Any] = deque()

    def add(self, work: Work) -> None:
        with self._lock:
            self._forget_completed()
            self._works.append(work)

    def forget_completed(self) -> None:
        """Hold those that are complete, and their tensors, no longer."""
        with self._lock:
            self._forget_completed()

    def wait_for_end(self, group: object) -> None:
        """Return when none can write into its tensors any more; call it when all connections are closed.

        Gloo never ends one of which a part of a message has arrived: it hangs until the group's timeout, writes
        nothing, and destroying the group would wait for it. A thread, which holds `group`, does that then.
        """
        deadline = time.monotonic() + _END_SECONDS
        with self._lock:
            works = list(self._works)
            self._works.clear()
        while works and time.monotonic() < deadline:
            if _has_ended(works[-1]):
                works.pop()
            else:
                time.sleep(_POLL_SECONDS)
        if works:
            start_thread_left_alone(_hold, [works, group], name="lockstep-ending")

    def _forget_completed(self) -> None:
        while self._works and _has_ended(self._works[0]):
            self._works.popleft()


def _hold(works: list[Any], _group: object) -> None:
    while works:
        with suppress(RuntimeError):
            works.pop().wait()


def _has_ended(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it has failed
        return True
