"""What is the trainer's to call: `step` of the optimizer and of the scheduler, which every plain training loop calls.

A loop that was moved over and still calls them would make each update twice, or decay twice as fast, without a word.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch.optim import Optimizer


@final
class StepGuard:
    """Refuses an optimizer's `step` outside of `allowed`, as long as a trainer of the optimizer is there."""

    def __init__(self) -> None:
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_allowed = False

    def __call__(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Be called by the optimizer before each step."""
        if self._trainers and not self._is_allowed:
            raise ValueError(
                "optimizer.step() was called outside of Trainer.step, which has made the update already. Leave it out "
                "of the loop, and zero_grad and backward with it."
            )

    def add(self, trainer: Any) -> None:
        """Note a trainer of the optimizer."""
        self._trainers.add(trainer)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the optimizer step in this context."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False


def guard_steps(optimizer: Optimizer, trainer: Any) -> StepGuard:
    """Return the one guard of an optimizer, which several trainers may share one after the other."""
    hooks = optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001 - torch has no public list of them
    guard = next((hook for hook in hooks if isinstance(hook, StepGuard)), None)
    if guard is None:
        guard = StepGuard()
        optimizer.register_step_pre_hook(guard)
    guard.add(trainer)
    return guard


@final
class ScheduleWatch:
    """Warns, once, of a scheduler that somebody else steps too."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._has_warned = False
        self._count = self._read()

    def check(self) -> None:
        """Compare with what was noted last."""
        if self._read() != self._count and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The scheduler was stepped outside of Trainer.step, which steps it once per step: the learning rate "
                "changes faster than it says. Leave scheduler.step() out of the loop; or, for one that counts epochs, "
                "leave scheduler= out of the trainer.",
                stacklevel=4,
            )
        self.note()

    def note(self) -> None:
        """Take in where the scheduler stands."""
        self._count = self._read()

    def _read(self) -> int | None:
        count: int | None = getattr(self._scheduler, "last_epoch", None)
        return count
