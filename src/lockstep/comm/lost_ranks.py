"""Finding lost ranks while a device waits for them.

A call of NCCL returns when its kernel is queued, and `wait` only queues a wait. So the host does not notice a lost
rank: it blocks later, where it reads a value, until the backend's own timeout ends the process. Each group with such a
backend therefore has a thread that watches the other ranks:

    thread                                            the thread that reads a value
    ------                                            -----------------------------
                                                      1 blocks: the kernel waits for a rank that was killed
    2 finds that the rank is lost
    3 marks the group as broken, for this rank and
      the others on this host
    4 aborts the backend: its kernels end             5 returns; `raise_if_broken` raises PeerLostError

The value that step 5 reads is not valid. So whoever reads a result on a device calls `raise_if_broken` before using it.
"""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from torch.distributed import Work

from lockstep.errors import PeerLostError

_LOGGER = logging.getLogger("lockstep")
ABORT_SECONDS: Final = 60.0
"""How long a backend may take to end the calls that a device is in."""
_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 0.5
"""How long a call may take that has everything it needs from a rank that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedGroup:
    """What the thread does with a group."""

    find_lost: Callable[[], PeerLostError | None]
    """Returns the error for a rank that makes no more calls, if there is one."""
    find_failed: Callable[[], PeerLostError | None]
    """Returns the same for a rank that was killed or failed, and did not just leave the group."""
    mark_broken: Callable[[PeerLostError], None]
    """Lets later calls raise the error, and publishes it."""
    abort: Callable[[], None]
    """Ends the calls that the device is in."""


@final
class DeviceWatch:
    """The thread that watches the ranks of one group; it starts with the first call on a device.

    `group` must not keep the process group alive. A call that does not end in `stall_seconds` is logged; 0 for never.
    """

    def __init__(self, group: WatchedGroup, stall_seconds: float) -> None:
        self._group = group
        self._stall_seconds = stall_seconds
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: tuple[Work, str, float] | None = None

    def add(self, work: Work, call: str) -> None:
        """Watch a call; those before it on this device end before it does."""
        self._last = work, call, time.monotonic()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed.is_set():
                    self._thread = threading.Thread(
                        target=_watch, args=(weakref.ref(self), self._closed), name="lockstep-devices", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._last = None
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_POLL_SECONDS + _GRACE_SECONDS)

    def look(self) -> bool:
        """Look once; return whether the watch is over, because the group is broken."""
        last = self._last
        if last is None:
            return False
        lost = self._group.find_lost()
        if lost is None:
            self._log_stall(last)
            return False
        if self._closed.wait(_GRACE_SECONDS):
            return True
        is_done = _is_completed(last[0])
        if is_done and self._group.find_failed() is None:
            return False  # the rank left the group, and no call needs it
        self._group.mark_broken(lost)
        if not is_done:
            _LOGGER.error("%s did not end on the device. %s (LS203)", last[1], lost)
            self._group.abort()
        return True

    def _log_stall(self, last: tuple[Any, str, float]) -> None:
        work, call, started = last
        if not 0 < self._stall_seconds < time.monotonic() - started:
            return
        if _is_completed(work):
            self._last = None
            return
        self._last = work, call, math.inf  # once
        _LOGGER.warning(
            "%s has not ended on the device after %g s. Look for a branch or a loop that differs between ranks. "
            "(LOCKSTEP_STALL_SECONDS sets after how many seconds this is logged.) (LS215)",
            call,
            self._stall_seconds,
        )


def _watch(watch: "weakref.ref[DeviceWatch]", closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        target = watch()
        if target is None or target.look():
            return
        del target


def _is_completed(work: Work) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it has failed, and whoever waits for it gets the error
        return True
