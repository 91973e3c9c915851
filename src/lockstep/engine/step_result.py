"""What a step returns. Its loss may still be on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from lockstep.data import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step has computed; the same on every worker."""

    loss: float
    """See `StepResult`."""
    weight: float
    """See `StepResult`."""
    is_skipped: bool
    """See `StepResult`."""


@final
class StepResult:
    """What one step did; the same on every worker.

    On an asynchronous device `loss`, `weight` and `is_skipped` wait for the device where its results are not read yet:
    to look at them after each step costs the time in which the host could have launched the next one.

    Args:
        cursor: The step that was taken.
        should_stop: See the attribute.
        read: Returns what the step has computed; may wait for the device.

    Attributes:
        cursor: The step that was taken.
        should_stop: Whether some worker was asked to stop (`Trainer.request_stop`); the same on all workers after the
            same step. Not after the last step of an epoch, unless it is the only one: what a loop does between two
            epochs (step a scheduler, evaluate) belongs to it.
    """

    __slots__ = ("_read", "cursor", "should_stop")

    def __init__(self, *, cursor: Cursor, should_stop: bool, read: Callable[[], StepOutcome]) -> None:
        self.cursor = cursor
        self.should_stop = should_stop
        self._read = read

    @property
    def loss(self) -> float:
        """Weighted mean loss of the global batch, in the order of the tree: the same bits on any number of workers."""
        return self._read().loss

    @property
    def weight(self) -> float:
        """Summed weight of the global batch: samples, unless the loss says otherwise."""
        return self._read().weight

    @property
    def is_skipped(self) -> bool:
        """Whether the loss was not finite and nothing was changed but the cursor and the learning rate."""
        return self._read().is_skipped

    def __eq__(self, other: object) -> bool:
        """Compare what the steps did."""
        return isinstance(other, StepResult) and self._values() == other._values()

    def __hash__(self) -> int:
        """Hash what the step did."""
        return hash(self._values())

    def __repr__(self) -> str:
        """Show what the step did."""
        return (
            f"StepResult(loss={self.loss!r}, weight={self.weight!r}, cursor={self.cursor!r}, "
            f"is_skipped={self.is_skipped!r}, should_stop={self.should_stop!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the values to another process."""
        return _restore, (self.cursor, self.should_stop, self._read())

    def _values(self) -> tuple[Any, ...]:
        return self._read(), self.cursor, self.should_stop


def _restore(cursor: Cursor, should_stop: bool, outcome: StepOutcome) -> StepResult:
    return StepResult(cursor=cursor, should_stop=should_stop, read=lambda: outcome)
