"""What a step returns. Its loss may still be on the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from lockstep.data import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step has computed, as in `StepResult`; the same on every worker."""

    loss: float
    weight: float
    is_skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None


@final
class StepResult:
    """What one step did; the same on every worker.

    On an asynchronous device `loss`, `weight` and `is_skipped` wait for the device where its results are not read yet:
    to look at them after each step costs the time in which the host could have launched the next one.

    `cursor` is the step that was taken. `should_stop`: some worker was asked to stop (`Trainer.request_stop`), or a
    callback has ended the training; the same on all workers after the same step. Not after the last step of an epoch,
    unless it is the only one: what a loop does between two epochs (step a scheduler, evaluate) belongs to it.
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
    def values(self) -> Mapping[str, float]:
        """Weighted means over the global batch of what the loss function returned besides the loss, by name.

        With one loss function for each optimizer: the loss of each one that has stepped by its name, and what its loss
        function returned besides as `name/value`.
        """
        return self._read().values

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the reduced gradient before it is clipped; None if it was not computed.

        It is where the trainer clips (`max_grad_norm`) or was made with `track_grad_norm`.
        """
        return self._read().grad_norm

    @property
    def is_skipped(self) -> bool:
        """Whether the loss was not finite and nothing was changed but the cursor and the learning rate."""
        return self._read().is_skipped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepResult) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.loss, self.weight, self.is_skipped, self.cursor, self.should_stop))

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self.loss!r}, weight={self.weight!r}, cursor={self.cursor!r}, "
            f"is_skipped={self.is_skipped!r}, should_stop={self.should_stop!r}"
            f"{f', values={dict(self.values)!r}' if self.values else ''})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the values to another process."""
        return _restore, (self.cursor, self.should_stop, self._read())

    def _values(self) -> tuple[Any, ...]:
        return self._read(), self.cursor, self.should_stop


def merge_updates(reads: Mapping[str, Callable[[], StepOutcome]], main: str) -> Callable[[], StepOutcome]:
    """Return what reads the outcome of a step of several updates, with the loss of `main` where that was made."""

    def read() -> StepOutcome:
        outcomes = {name: each() for name, each in reads.items()}
        first = outcomes[main] if main in outcomes else next(iter(outcomes.values()))
        values = {name: each.loss for name, each in outcomes.items()}
        for name, each in outcomes.items():
            values.update({f"{name}/{key}": value for key, value in each.values.items()})
        is_skipped = any(each.is_skipped for each in outcomes.values())
        return StepOutcome(
            loss=first.loss, weight=first.weight, is_skipped=is_skipped, values=values, grad_norm=first.grad_norm
        )

    return read


def _restore(cursor: Cursor, should_stop: bool, outcome: StepOutcome) -> StepResult:
    return StepResult(cursor=cursor, should_stop=should_stop, read=lambda: outcome)
