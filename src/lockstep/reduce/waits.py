"""Since when a rank waits at the end of a backward. Another thread reads it."""

import math
import time
from typing import final


@final
class Waits:
    """The wait of one rank for a reduction that is under way, if any."""

    def __init__(self) -> None:
        self._since = math.inf

    def begin(self) -> None:
        """Begin to wait."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Wait no more."""
        self._since = math.inf

    def seconds(self) -> float:
        """Return for how many seconds this rank has waited by now; below zero if it does not."""
        return time.monotonic() - self._since
