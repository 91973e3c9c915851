"""Moving shards from slow workers to fast ones, by how long each takes for a shard, its waits for others left out.

[Note: the same decision on all workers] Every worker measures itself. The measurements of all workers are in the step
table, and each worker computes the same decision from the same numbers, so the decision itself is not sent. It takes
effect at the first step that no worker's loader has requested yet, for its loading processes or for a prefetcher of the
user's. The furthest step that each loader has requested is in the table too, and no loader requests further steps
between the exchange of the table and the decision.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

import torch

from lockstep.data import Cursor, ShardedBatch
from lockstep.devices.transfer import record_event
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.recording import WorkerRecorder
from lockstep.shards.assignment import balance_ranges

_NUM_STEPS = 5
"""A decision is made from so many steps, of which the median counts: a single slow step moves nothing."""
_MIN_GAIN = 0.08
"""A step must become shorter by this part, or shards stay where they are."""


@final
class ShardBalance(StepPart):
    def __init__(self, stopwatch: "Stopwatch | None") -> None:
        self._measured: deque[Sequence[float]] = deque(maxlen=_NUM_STEPS)
        if stopwatch is not None:
            self._seconds = Column(float, lambda _: stopwatch.seconds_per_shard())
            self._epoch = Column(int, lambda step: step.batch.assignment.last_requested.epoch)
            self._step = Column(int, lambda step: step.batch.assignment.last_requested.step)
            self.columns = self._seconds, self._epoch, self._step

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if self.columns:
            last_requested = max(map(Cursor, rows[self._epoch], rows[self._step]))
            self.note(step.batch, rows[self._seconds], last_requested)

    def note(self, batch: ShardedBatch, seconds: Sequence[float], last_requested: Cursor) -> None:
        """Move shards if steps become shorter; `seconds` are per shard, for each worker, 0 where not measured."""
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


@dataclass(slots=True)
class _Lap:
    began: torch.Event
    ended: torch.Event | None = None
    num_shards: int = 0


@final
class Stopwatch:
    """Measures the shards of each step, by their events in the recording. [Note: one clock].

    On an asynchronous `device` by events on its stream: those of a step are reported in the next one, for to wait for
    them would leave the device without work.
    """

    def __init__(
        self, recorder: WorkerRecorder, last_gradient_ns: Callable[[], int], device: torch.device | None = None
    ) -> None:
        self._recorder = recorder
        self._last_gradient_ns = last_gradient_ns
        self._device = device
        self._events: list[int] = []
        self._lap: _Lap | None = None
        self._last: _Lap | None = None

    def start(self) -> None:
        self._events = []
        if self._device is not None:
            self._last, self._lap = self._lap, _Lap(record_event(self._device, is_timed=True))

    def begin_shard(self, event: int) -> None:
        self._events.append(event)

    def end_shard(self, number: int) -> None:
        """Note that so many shards are done; not called for the last one, which waits for others."""
        if self._lap is not None and self._device is not None:
            self._lap.num_shards, self._lap.ended = number, record_event(self._device, is_timed=True)

    def last_gradient(self) -> None:
        """Note that the last shard's gradients are computed; on a device it counts where there is no other."""
        if self._lap is not None and not self._lap.num_shards:
            self.end_shard(1)

    def seconds_per_shard(self) -> float:
        """Return the mean time of the shards before the last one, or that of the only one; 0 if it is not known."""
        if self._device is not None:
            lap = self._last
            if lap is None or lap.ended is None or not lap.ended.query():
                return 0.0
            return lap.began.elapsed_time(lap.ended) / 1000 / lap.num_shards
        found = [moments for each in self._events if (moments := self._recorder.moments(each))[0]]
        if len(found) == 1 and len(self._events) == 1:
            return max(self._last_gradient_ns() - found[0][0], 0) / 1e9
        if len(found) < 2:  # noqa: PLR2004 - the last one's end is after the wait for others
            return 0.0
        return max(found[-2][1] - found[0][0], 0) / 1e9 / (len(found) - 1)
