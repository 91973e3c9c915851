"""The losses of an epoch's steps: recorded one by one, and added up for the epoch's mean."""

import math
from dataclasses import dataclass
from typing import final

from lockstep.engine.step_result import StepResult
from lockstep.events import Recorder, StepFinished


@dataclass(slots=True)
class EpochSums:
    """Sums for the mean loss of an epoch; a run resumed in the middle of an epoch starts with those before it."""

    loss: float = 0.0
    """Sum of loss times weight over the steps of the epoch that were not skipped."""
    weight: float = 0.0
    """Sum of their weights."""

    def take_mean(self) -> float:
        """Return the mean loss of an epoch that is over, NaN where nothing had a weight, and begin with the next."""
        mean = self.loss / self.weight if self.weight else math.nan
        self.loss = self.weight = 0.0
        return mean


@final
class StepLosses:
    """Adds up and records the losses of an epoch's steps.

    To read a loss is to wait for the device, which has nothing to do then until the next step is launched. So where
    the device is asynchronous, a step is recorded when the next one is launched.
    """

    def __init__(self, sums: EpochSums, recorder: Recorder, *, is_late: bool) -> None:
        self._sums = sums
        self._recorder = recorder
        self._is_late = is_late
        self._last: tuple[StepResult, int, float | None] | None = None

    def add(self, result: StepResult, global_step: int, learning_rate: float | None = None) -> None:
        """Take in a step, which was update `global_step`."""
        self.record_last()
        self._last = result, global_step, learning_rate
        if not self._is_late:
            self.record_last()

    def record_last(self) -> None:
        """Record the last step, if it is not recorded yet."""
        if self._last is None:
            return
        (result, global_step, learning_rate), self._last = self._last, None
        weight = 0.0 if result.is_skipped else result.weight
        if weight:
            self._sums.loss += result.loss * weight
            self._sums.weight += weight
        self._recorder.record(
            StepFinished(
                epoch=result.cursor.epoch,
                step=result.cursor.step,
                global_step=global_step,
                loss=result.loss,
                weight=weight,
                learning_rate=learning_rate,
                grad_norm=result.grad_norm,
            )
        )
