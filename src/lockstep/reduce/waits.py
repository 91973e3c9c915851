"""What a rank waits for in a reduction, and since when. Another thread reads it when it takes long."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from lockstep.reduce.bucket_set import Bucket

_NUM_NAMES = 3
"""So many parameters of a bucket are named."""


@final
class Waits:
    """The wait of one rank that is under way, if any.

    Attributes:
        on_long: Called by the thread that watches, again and again while a wait takes longer than a second.
    """

    def __init__(self) -> None:
        self.on_long: Callable[[], None] = _do_nothing
        self._since = math.inf
        self._what: int | str = 0

    def begin(self, what: int | str) -> None:
        """Begin to wait, for a bucket by its number or for something in words."""
        self._since, self._what = time.monotonic(), what

    def turn_to(self, what: int | str) -> None:
        """Set what this rank waits for now, if it waits."""
        self._what = what

    def end(self) -> None:
        """Wait no more."""
        self._since, self._what = math.inf, 0

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Wait for `what` within."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def seconds(self) -> float:
        """Return for how many seconds this rank has waited by now; below zero if it does not."""
        return time.monotonic() - self._since

    def describe(self, buckets: Sequence[Bucket]) -> str:
        """Return in words what this rank waits for; empty if it does not."""
        if not math.isfinite(self._since):
            return ""
        if isinstance(self._what, str):
            return f"waits for {self._what}"
        if self._what >= len(buckets):
            return "waits for the last message of a backward"
        names = [slot.name for slot in buckets[self._what].slots]
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        return f"waits for bucket {self._what + 1} of {len(buckets)} ({', '.join(names[:_NUM_NAMES])}{more})"


def _do_nothing() -> None:
    """Do nothing: nobody wants to know of long waits."""
