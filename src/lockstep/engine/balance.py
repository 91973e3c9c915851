"""Moving shards from slow workers to fast ones.

[Note: the same decision on all workers] Every worker measures itself. The measurements of all workers are in the step
table, and each worker computes the same decision from the same numbers, so the decision itself is not sent. It takes
effect at the first step that no worker's loader has requested yet, for its loading processes or for a prefetcher of the
user's. The furthest step that each loader has requested is in the table too, and no loader requests further steps
between the exchange of the table and the decision.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

import torch

from lockstep.data import Cursor, ShardedBatch
from lockstep.devices.asynchrony import is_asynchronous
from lockstep.shards.balance import balance_ranges

_NUM_STEPS = 5
"""A decision is made from so many steps, of which the median counts: a single slow step moves nothing."""
_MIN_GAIN = 0.08
"""A step must become shorter by this part, or shards stay where they are."""


@dataclass(slots=True)
class _Lap:
    """What was measured of one step."""

    began: float | torch.Event = 0.0
    """When the first shard began."""
    ended: float | torch.Event = 0.0
    """When the last measured one ended."""
    num_shards: int = 0
    """How many shards lie between."""


@final
class Stopwatch:
    """Measures how long a worker takes for a shard, its waits for others left out.

    On an asynchronous device events on its stream are measured. Those of a step are reported in the next one, when they
    are there: to wait for them would leave the device without work.

    Args:
        device: Where shards run.
        is_used: Whether anybody looks at it.
    """

    def __init__(self, device: torch.device, *, is_used: bool = True) -> None:
        self._device = device
        self._is_used = is_used
        self._is_asynchronous = is_asynchronous(device)
        self._lap = self._last = _Lap()

    def start(self) -> None:
        """Begin with a step."""
        if self._is_used:
            self._last, self._lap = self._lap, _Lap(began=self._now())

    def lap(self, num_shards: int) -> None:
        """Note that so many shards are done."""
        if self._is_used:
            self._lap.num_shards = num_shards
            self._lap.ended = self._now()

    def lap_if_only(self) -> None:
        """Note that the last shard's gradients are computed; it counts where there is no other."""
        if not self._lap.num_shards:
            self.lap(1)

    def seconds_per_shard(self) -> float:
        """Return the time of a shard in this step, or on an asynchronous device in the last; 0 if it is not known."""
        lap = self._last if self._is_asynchronous else self._lap
        if not lap.num_shards:
            return 0.0
        if isinstance(lap.began, torch.Event) and isinstance(lap.ended, torch.Event):
            return lap.began.elapsed_time(lap.ended) / 1000 / lap.num_shards if lap.ended.query() else 0.0
        assert isinstance(lap.began, float)
        assert isinstance(lap.ended, float)
        return (lap.ended - lap.began) / lap.num_shards

    def _now(self) -> float | torch.Event:
        if not self._is_asynchronous:
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

    def note(self, batch: ShardedBatch, seconds: Sequence[float], last_requested: Cursor) -> None:
        """Record what the workers measured in the step of `batch`, and move shards if that makes steps shorter.

        Args:
            batch: Its step is over.
            seconds: Per shard, for each worker; 0 where it was not measured.
            last_requested: The furthest step that any worker's loader has requested.
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
