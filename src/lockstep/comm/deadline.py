"""When something must be done: made once from a timeout and passed down, so that the steps of it share one limit."""

import time
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment on the monotonic clock, and the limit that it was made from."""

    end: float
    """The moment, in seconds."""
    limit: timedelta
    """The whole time from the start, for messages."""

    @staticmethod
    def after(limit: timedelta) -> "Deadline":
        """Return the moment when `limit` has passed from now on."""
        return Deadline(end=time.monotonic() + limit.total_seconds(), limit=limit)

    def with_at_least(self, seconds: float) -> "Deadline":
        """Return this deadline, or one in so many seconds if that is later: for a step that can hardly wait less."""
        return Deadline(end=max(self.end, time.monotonic() + seconds), limit=self.limit)

    def seconds_left(self, at_least: float = 0.0) -> float:
        """Return how much time is left, or `at_least`: for what needs a moment even when the time is up."""
        return max(self.end - time.monotonic(), at_least)

    def left(self, at_least: float = 0.0) -> timedelta:
        """Return the same as a timedelta."""
        return timedelta(seconds=self.seconds_left(at_least))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    @property
    def used_seconds(self) -> float:
        """How much of the limit has passed."""
        return self.limit.total_seconds() - (self.end - time.monotonic())
