"""Recording on one worker at a time, and by the next one if it is lost, without a missing or a doubled row.

    rank 0, until it is killed       the next rank 0
    --------------------------       ---------------
    row of step 6                    remembers the event of step 6
    row of ste                       remembers the event of step 7
                                     step 8 continues without rank 0
                                     removes the half row, writes those of 7 and 8

Every worker makes the same calls, so every worker sees the same events. One that was ahead when it was killed may have
written a row that the others reach only later: that row is left out then.
"""

from collections import deque
from collections.abc import Callable
from typing import final

from lockstep.events import Event, Recorder, RecordingTakenOver, RunStarted
from lockstep.report.metrics_file import MetricsFile, RowKey, key_of

_NUM_REMEMBERED = 32
"""More than there are events between two calls in which workers wait for each other."""


@final
class Succession:
    """A recorder on every worker, of which one writes at a time; one that begins to write calls `show`, once."""

    def __init__(self, is_recording: Callable[[], bool], metrics: MetricsFile, show: Callable[[], Recorder]) -> None:
        self._is_recording = is_recording
        self._metrics = metrics
        self._show = show
        self._shown: Recorder | None = None
        self._run: RunStarted | None = None
        self._remembered: deque[Event] = deque(maxlen=_NUM_REMEMBERED)
        self._written: frozenset[RowKey] = frozenset()

    def record(self, event: Event) -> None:
        """Write the event, or remember it, if another worker writes."""
        if isinstance(event, RunStarted):
            self._run = event
        if not self._is_recording():
            if key_of(event) is not None:
                self._remembered.append(event)
            return
        if self._shown is None:
            self._shown = self._show()
            if not isinstance(event, RunStarted | RecordingTakenOver):
                self._take_over(self._shown, event.global_step)
        self._write(self._shown, event)

    def _take_over(self, shown: Recorder, global_step: int) -> None:
        self._written = self._metrics.take_over()
        if self._run is not None:
            shown.record(RecordingTakenOver(run=self._run, global_step=global_step))
        for event in self._remembered:
            self._write(shown, event)
        self._remembered.clear()

    def _write(self, shown: Recorder, event: Event) -> None:
        if key_of(event) not in self._written:
            self._metrics.record(event)
            shown.record(event)
