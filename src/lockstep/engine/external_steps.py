"""Calls of `optimizer.step()` and `scheduler.step()` outside of a trainer, which makes both by itself.

A loop that still makes them would update twice per step, or decay twice as fast, without an error.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch.optim import Optimizer

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.modules import optimizer_step_pre_hooks


@final
class StepGuard:
    """Refuses an optimizer's `step`, as long as there is a trainer of the optimizer."""

    def __init__(self) -> None:
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_allowed = False

    def __call__(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Check a step of the optimizer, which calls this hook before it."""
        if self._trainers and not self.is_allowed:
            raise ValueError(
                "optimizer.step() was called outside of Trainer.step, which has made the update already. Leave it out "
                "of the loop, and zero_grad and backward with it. (LS517)"
            )

    def add(self, trainer: Any) -> None:
        self._trainers.add(trainer)

    def remove(self, trainer: Any) -> None:
        self._trainers.discard(trainer)


@final
class StepGuards:
    def __init__(self, optimizers: Sequence[Optimizer], trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # which holds this: a cycle would keep its group open for long
        self._guards = [_guard_steps(each, trainer) for each in optimizers]

    def remove(self) -> None:
        for guard in self._guards:
            guard.remove(self._trainer())

    @contextmanager
    def allowed(self) -> Iterator[None]:
        for guard in self._guards:
            guard.is_allowed = True
        try:
            yield
        finally:
            for guard in self._guards:
                guard.is_allowed = False


def _guard_steps(optimizer: Optimizer, trainer: Any) -> StepGuard:
    """Return the one guard of an optimizer, which several trainers may share one after the other."""
    hooks = optimizer_step_pre_hooks(optimizer).values()
    guard = next((hook for hook in hooks if isinstance(hook, StepGuard)), None)
    if guard is None:
        guard = StepGuard()
        optimizer.register_step_pre_hook(guard)
    guard.add(trainer)
    return guard


@final
class SchedulerStepCheck:
    """Warns, once, if the user's code steps the scheduler as well."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._has_warned = False
        self._count = self._read()

    def check(self) -> None:
        if self._read() != self._count and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The scheduler was stepped outside of Trainer.step, which steps it once per step: the learning rate "
                "changes faster than it says. Leave scheduler.step() out of the loop; or, for one that counts epochs, "
                "leave scheduler= out of the trainer. (LS517)",
                stacklevel=stacklevel_of_user(),
            )
        self.note()

    def note(self) -> None:
        self._count = self._read()

    def _read(self) -> int | None:
        count: int | None = getattr(self._scheduler, "last_epoch", None)
        return count
