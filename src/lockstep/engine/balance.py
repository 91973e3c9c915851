"""Moving shards from slow workers to fast ones.

[Note: the same decision on all workers] Every worker measures itself. The measurements of all workers are in the step
table, and each worker computes the same decision from the same numbers, so the decision itself is not sent. It takes
effect at the first step that no worker's loader was asked for yet, by its loading processes or by a prefetcher of the
user's. How far each loader was asked is in the table too, and no loader requests further steps between the exchange of
the table and the decision.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import final

import torch

from lockstep.data import Cursor, ShardedBatch
from lockstep.shards.balance import balance_ranges

_NUM_STEPS = 5
"""A decision is made from so many steps, of which the median counts: a single slow step moves nothing."""
_MIN_GAIN = 0.08
"""A step must become shorter by this part, or shards stay where they are."""


@final
class Stopwatch:
    """Measures how long a worker takes for a shard, its waits for others left out.

    On a GPU events on its stream are measured, which are read when the step is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_shards = 0
        self._began: float | torch.Event = 0.0
        self._ended: float | torch.Event = 0.0

    def start(self) -> None:
        """Begin with a step."""
        self._num_shards = 0
        self._began = self._now()

    def lap(self, num_shards: int) -> None:
        """Note that so many shards are done."""
        self._num_shards = num_shards
        self._ended = self._now()

    def lap_if_only(self) -> None:
        """Note that the last shard's gradients are computed; it counts where there is no other."""
        if not self._num_shards:
            self.lap(1)

    def seconds_per_shard(self) -> float:
        """Return the time of a shard in the step that is over; 0 if it was not measured."""
        if not self._num_shards:
            return 0.0
        if isinstance(self._began, torch.Event) and isinstance(self._ended, torch.Event):
            self._ended.synchronize()
            return self._began.elapsed_time(self._ended) / 1000 / self._num_shards
        assert isinstance(self._began, float)
        assert isinstance(self._ended, float)
        return (self._ended - self._began) / self._num_shards

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@final
class Balancer:
    """Decides from the workers' measurements who runs which shards. [Note: the same decision on all workers]."""

    def __init__(self) -> None:
        self._measured: deque[Sequence[float]] = deque(maxlen=_NUM_STEPS)
        self._valid_from: tuple[int, int] = (0, 0)

    def note(self, batch: ShardedBatch, seconds: Sequence[float], asked: Cursor) -> None:
        """Record what the workers measured in the step of `batch`, and move shards if that makes steps shorter.

        Args:
            batch: Its step is over.
            seconds: Per shard, for each worker; 0 where it was not measured.
            asked: The furthest step that any worker's loader was asked for.
        """
        if min(seconds) <= 0 or batch.assignment.is_changing(batch.cursor):
            return
        self._measured.append(tuple(seconds))
        if len(self._measured) < _NUM_STEPS:
            return
        typical = [median(column) for column in zip(*self._measured, strict=True)]
        ranges = balance_ranges(typical, batch.ranges, min_gain=_MIN_GAIN)
        if ranges != batch.ranges:
            batch.assignment.change(ranges, after=batch.cursor, asked=asked)
            self._measured.clear()
