"""Throttling of a background save, so that it slows the training down as little as possible.

Copying, hashing and writing a state moves each of its bytes through memory several times, as an optimizer step does.
Training and save share the memory bandwidth even if each has a core of its own, so a low priority alone does not help.
The saving thread therefore sleeps after each piece of work, as long as the work took. When the training waits for the
save, throttling is disabled.
"""

import threading
import time
from collections.abc import Callable
from typing import final

Pause = Callable[[], None]
"""Called after each piece of work; sleeps if necessary."""

_PAUSE_PER_CPU_SECOND = 1.0
_MIN_WORK_SECONDS = 0.02
"""No pause before this much CPU time was used: after each one a thread of low priority has to wait for a core."""
_MAX_PAUSE_SECONDS = 0.5


def no_pause() -> None:
    """Do not sleep."""


@final
class Throttle:
    """Throttle of one save. The saving thread calls `pause`, the training thread calls `disable`."""

    def __init__(self) -> None:
        self._is_disabled = threading.Event()
        self._cpu_seconds = 0.0

    def pause(self) -> None:
        """Sleep in proportion to the CPU time used since the last pause, unless throttling is disabled."""
        cpu_seconds = time.thread_time()
        used_seconds = cpu_seconds - self._cpu_seconds
        if used_seconds < _MIN_WORK_SECONDS:
            return
        self._cpu_seconds = cpu_seconds
        if threading.main_thread().is_alive():  # else the program has ended, and the interpreter waits for the save
            self._is_disabled.wait(min(_PAUSE_PER_CPU_SECOND * used_seconds, _MAX_PAUSE_SECONDS))

    def disable(self) -> None:
        """End the current pause, and do not sleep any more, because the training waits for the save."""
        self._is_disabled.set()
