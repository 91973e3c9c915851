"""Which worker runs which shards in which step; this may change during a run."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from lockstep.data.cursor import Cursor
from lockstep.shards import even_ranges


@final
class ShardAssignment:
    """The shards of every worker, step by step; the same on every worker.

    A loader requests the shards of later steps because it prefetches. So a change takes effect at a step that no worker
    has requested yet.
    """

    def __init__(self, world_size: int, num_shards: int) -> None:
        self.last_requested = Cursor()
        self._asking = threading.RLock()
        self._before = self._now = even_ranges(world_size, num_shards)
        self._since = Cursor()

    def ranges(self, cursor: Cursor) -> tuple[range, ...]:
        """Return the shards of every worker, in rank order, in the step at `cursor`."""
        with self._asking:
            self.last_requested = max(self.last_requested, cursor)
            return self._now if cursor >= self._since else self._before

    def held(self) -> AbstractContextManager[object]:
        """Return a context that blocks requests of other threads, so that `last_requested` does not change in it."""
        return self._asking

    def is_changing(self, cursor: Cursor) -> bool:
        """Whether a change is decided that does not hold yet in the step at `cursor`."""
        return cursor < self._since

    def change(self, ranges: Sequence[range], *, after: Cursor, last_requested: Cursor) -> None:
        """Let workers run other shards when `after` is over, from the first beyond every worker's `last_requested`."""
        self._before = self.ranges(after)
        self._now = tuple(ranges)
        self._since = Cursor(last_requested.epoch, last_requested.step + 1)
