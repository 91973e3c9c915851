"""How fast a background save goes: so slowly that the training hardly notices it, until somebody waits for it.

Copying, hashing and writing a state moves each of its bytes through memory several times, which is what an optimizer's
step does too. Where there is a core for each, the bandwidth of the memory is what they share, and a low priority does
not help. So the writing thread rests, for a multiple of the processor time that it has used.
"""

import threading
import time
from collections.abc import Callable
from typing import final

Pause = Callable[[], None]
"""Called after each piece of work; returns when the next one may begin."""

_PAUSE_PER_CPU_SECOND = 1.0
_MIN_WORK_SECONDS = 0.02
"""Shorter pieces of work are taken together: after each rest a thread of low priority waits for a core."""
_MAX_PAUSE_SECONDS = 0.5


def no_pause() -> None:
    """Go on at once."""


@final
class Throttle:
    """The pace of one save; made by the training, `rest` is called by the thread that writes."""

    def __init__(self) -> None:
        self._is_disabled = threading.Event()
        self._cpu_seconds = 0.0

    def pause(self) -> None:
        """Pause for what was done since the last rest, unless somebody waits."""
        worked_seconds = time.thread_time()
        piece_seconds = worked_seconds - self._cpu_seconds
        if piece_seconds < _MIN_WORK_SECONDS:
            return
        self._cpu_seconds = worked_seconds
        if threading.main_thread().is_alive():  # else the program has ended, and the interpreter waits for the save
            self._is_disabled.wait(min(_PAUSE_PER_CPU_SECOND * piece_seconds, _MAX_PAUSE_SECONDS))

    def disable(self) -> None:
        """End the rests, for somebody waits."""
        self._is_disabled.set()
