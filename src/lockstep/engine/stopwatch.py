"""How long a worker takes for a shard, its waits for others left out: what shards are moved by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import torch

from lockstep.recording import WorkerRecorder


class Stopwatch(Protocol):
    """Measures the shards of each step."""

    def start(self) -> None:
        """Begin with a step."""

    def begin_shard(self, event: int) -> None:
        """Note that a shard begins, of which this is the event in the recording."""

    def end_shard(self, number: int) -> None:
        """Note that so many shards are done; not called for the last one, which waits for others."""

    def last_gradient(self) -> None:
        """Note that the last shard's gradients are computed."""

    def seconds_per_shard(self) -> float:
        """Return the time of a shard in this step, or on an asynchronous device in the last; 0 if it is not known."""


@final
class RecordedShards:
    """Reads the recorded events of the shards. [Note: one clock]."""

    def __init__(self, recorder: WorkerRecorder, last_gradient_ns: Callable[[], int]) -> None:
        self._recorder = recorder
        self._last_gradient_ns = last_gradient_ns
        self._events: list[int] = []

    def start(self) -> None:
        self._events = []

    def begin_shard(self, event: int) -> None:
        self._events.append(event)

    def end_shard(self, number: int) -> None:
        """Do nothing: its end is recorded."""

    def last_gradient(self) -> None:
        """Do nothing: it is recorded."""

    def seconds_per_shard(self) -> float:
        """Return the mean time of the shards before the last one, or that of the only one; 0 if it is not known."""
        found = [moments for each in self._events if (moments := self._recorder.moments(each))[0]]
        if len(found) == 1 and len(self._events) == 1:
            return max(self._last_gradient_ns() - found[0][0], 0) / 1e9
        if len(found) < 2:  # noqa: PLR2004 - the last one's end is after the wait for others
            return 0.0
        return max(found[-2][1] - found[0][0], 0) / 1e9 / (len(found) - 1)


@dataclass(slots=True)
class _Lap:
    began: torch.Event
    """When the first shard began."""
    ended: torch.Event | None = None
    """When the last measured one ended."""
    num_shards: int = 0
    """How many shards lie between."""


@final
class DeviceShards:
    """Measures shards on an asynchronous device, by events on its stream.

    Those of a step are reported in the next one: to wait for them would leave the device without work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lap: _Lap | None = None
        self._last: _Lap | None = None

    def start(self) -> None:
        self._last, self._lap = self._lap, _Lap(self._record())

    def begin_shard(self, event: int) -> None:
        """Do nothing: the device reaches the shard later."""

    def end_shard(self, number: int) -> None:
        if self._lap is not None:
            self._lap.num_shards, self._lap.ended = number, self._record()

    def last_gradient(self) -> None:
        """Note that the last shard's gradients are computed; it counts where there is no other."""
        if self._lap is not None and not self._lap.num_shards:
            self.end_shard(1)

    def seconds_per_shard(self) -> float:
        lap = self._last
        if lap is None or lap.ended is None or not lap.ended.query():
            return 0.0
        return lap.began.elapsed_time(lap.ended) / 1000 / lap.num_shards

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
