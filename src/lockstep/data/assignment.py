"""Who runs which shards in which step, where that may change during a run."""

from collections.abc import Sequence
from typing import final

from lockstep.data.cursor import Cursor
from lockstep.shards import even_ranges


@final
class Assignment:
    """The shards of every worker, step by step; the same on every worker.

    A loader asks ahead of time, for it loads ahead. So a change holds from a step on that no worker can have asked for.

    Args:
        world_size: How many workers there are.
        num_shards: Number of shards of the run.
        num_steps_ahead: How many steps a loader may have asked for beyond the one that is under way.

    Raises:
        ValueError: More workers than shards.
    """

    def __init__(self, world_size: int, num_shards: int, num_steps_ahead: int) -> None:
        self._num_steps_ahead = num_steps_ahead
        self._before = self._now = even_ranges(world_size, num_shards)
        self._since = Cursor()

    def ranges(self, cursor: Cursor) -> tuple[range, ...]:
        """Return the shards of every worker, in rank order, in the step at `cursor`."""
        return self._now if cursor >= self._since else self._before

    def is_changing(self, cursor: Cursor) -> bool:
        """Whether a change is decided that does not hold yet in the step at `cursor`."""
        return cursor < self._since

    def change(self, ranges: Sequence[range], *, after: Cursor) -> None:
        """Let workers run other shards, from the first step on for which no loader has asked when `after` is over."""
        self._before = self.ranges(after)
        self._now = tuple(ranges)
        self._since = Cursor(after.epoch, after.step + self._num_steps_ahead + 1)
