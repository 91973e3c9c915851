"""Moving shards from slow workers to fast ones.

[Note: the same decision on all workers] Every worker measures itself. The measurements of all workers are in the step
table, and each worker computes the same decision from the same numbers, so the decision itself is not sent. It takes
effect at the first step that no worker's loader has requested yet, for its loading processes or for a prefetcher of the
user's. The furthest step that each loader has requested is in the table too, and no loader requests further steps
between the exchange of the table and the decision.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import final

from lockstep.data import Cursor, ShardedBatch
from lockstep.shards.assignment import balance_ranges

_NUM_STEPS = 5
"""A decision is made from so many steps, of which the median counts: a single slow step moves nothing."""
_MIN_GAIN = 0.08
"""A step must become shorter by this part, or shards stay where they are."""


@final
class Balancer:
    """Decides from the workers' measurements who runs which shards. [Note: the same decision on all workers]."""

    def __init__(self) -> None:
        self._measured: deque[Sequence[float]] = deque(maxlen=_NUM_STEPS)
        self._valid_from: tuple[int, int] = (0, 0)

    def note(self, batch: ShardedBatch, seconds: Sequence[float], last_requested: Cursor) -> None:
        """Record what the workers measured in the step of `batch`, and move shards if that makes steps shorter.

        `seconds` are per shard, for each worker; 0 where a worker has not measured.
        """
        if min(seconds) <= 0 or batch.assignment.is_changing(batch.cursor):
            return
        self._measured.append(tuple(seconds))
        if len(self._measured) < _NUM_STEPS:
            return
        typical = [median(column) for column in zip(*self._measured, strict=True)]
        ranges = balance_ranges(typical, batch.ranges, min_gain=_MIN_GAIN)
        if ranges != batch.ranges:
            batch.assignment.change(ranges, after=batch.cursor, last_requested=last_requested)
            self._measured.clear()
