"""Several optimizers in one trainer, each with its own parameters, some of which step more rarely than others.

A run with one optimizer has it as it is. Several become one object that the rest of the engine treats as an optimizer:
its groups are theirs, and its `step` steps those that are chosen for the update. Likewise their schedulers.

[Note: the updates of a step] With one loss function there is one backward per shard, after which every optimizer steps
whose turn it is. With one loss function for each optimizer, as in a GAN, a step is one *update* after the other on the
same batch, in the order of the dictionary: forward and backward of every shard by one loss, one reduction, the step of
one optimizer. The next update sees the parameters and buffers that it leaves. Each update is a transaction with a
commit of its own. Where one fails, those before it stay, and the step that is taken again continues with it.

[Note: steps outside of the trainer] A loop that still calls `optimizer.step()` or `scheduler.step()` would update twice
per step, or decay twice as fast, without an error. So the first is refused, and the second warned of.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import CheckpointError
from lockstep.torch_private.modules import optimizer_step_pre_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """One update of a step. [Note: the updates of a step]."""

    name: str
    """Of its optimizer, where each has a loss function of its own; else empty."""
    loss: Callable[..., Any]
    chosen: tuple[str, ...]
    """The optimizers that step; empty where the run has one, without a name."""


@final
class OptimizerSet(Optimizer):
    """Those in `chosen` step in the present update; `num_updates` of the present step were made, if it has several."""

    def __init__(self, parts: Mapping[str, Optimizer], every: Mapping[str, int]) -> None:
        # Not Optimizer's own: that makes groups and state of its own, and these are those of the parts.
        self.parts = dict(parts)
        self.every = {name: int(every.get(name, 1)) for name in parts}
        self.chosen: tuple[str, ...] = tuple(parts)
        self.num_updates = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {
            key if isinstance(key, Tensor) else (name, key): each
            for name, part in self.parts.items()
            for key, each in part.state.items()
        }

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for part in self.parts.values() for name, value in part.defaults.items()}

    def due(self, num_steps: int) -> list[str]:
        return [name for name, every in self.every.items() if (num_steps + 1) % every == 0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for name in self.chosen:
            self.parts[name].step()

    def state_dict(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {"optimizers": states, "every": dict(self.every), "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict.get("optimizers", {})
        every = dict(state_dict.get("every", {}))
        if list(saved) != list(self.parts) or every != self.every:
            raise CheckpointError(
                f"The state is of the optimizers {describe_frequencies(every)}, and this run has "
                f"{describe_frequencies(self.every)}: the result would differ. Make the trainer as it was made when "
                "the state was saved. (LS708)"
            )
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.num_updates = int(state_dict["num_updates"])


@final
class SchedulerSet:
    """The schedulers of several optimizers, seen as one: each is stepped when its optimizer has stepped."""

    def __init__(self, parts: Mapping[str, Any], optimizers: OptimizerSet) -> None:
        self.parts = dict(parts)
        self._optimizers = optimizers

    @property
    def last_epoch(self) -> int | None:
        """How often all parts together were stepped; None where one does not count."""
        with suppress(AttributeError):
            return sum(int(part.last_epoch) for part in self.parts.values())
        return None

    def step(self) -> None:
        for name in self._optimizers.chosen:
            if name in self.parts:
                self.parts[name].step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])


@final
class UpdatePlan:
    def __init__(self, optimizer: Optimizer, loss: Callable[..., Any] | Mapping[str, Callable[..., Any]]) -> None:
        self._optimizer = optimizer
        self._loss = loss
        self.losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]

    @property
    def main(self) -> str:
        """The first optimizer that steps in every step, whose loss is that of a step."""
        assert isinstance(self._optimizer, OptimizerSet)
        return next(name for name, every in self._optimizer.every.items() if every == 1)

    def updates(self, num_steps: int) -> Sequence[UpdateSpec]:
        """Return the updates that are left of the present step, of which some may have been made; never none."""
        if not isinstance(self._optimizer, OptimizerSet):
            assert not isinstance(self._loss, Mapping)
            return [UpdateSpec(name="", loss=self._loss, chosen=())]
        due = self._optimizer.due(num_steps)
        if not isinstance(self._loss, Mapping):
            return [UpdateSpec(name="", loss=self._loss, chosen=tuple(due))]
        updates = [UpdateSpec(name=name, loss=self._loss[name], chosen=(name,)) for name in due]
        return updates[self._optimizer.num_updates :]


def combine_optimizers(optimizer: Optimizer | Mapping[str, Optimizer], every: Mapping[str, int] | None) -> Optimizer:
    return OptimizerSet(optimizer, every or {}) if isinstance(optimizer, Mapping) else optimizer


def combine_schedulers(scheduler: Any, optimizer: Optimizer) -> Any:
    if isinstance(scheduler, Mapping) and isinstance(optimizer, OptimizerSet):
        return SchedulerSet(scheduler, optimizer)
    return scheduler


def class_name(value: object) -> str | None:
    if isinstance(value, OptimizerSet | SchedulerSet):
        return ", ".join(f"{name}: {type(part).__name__}" for name, part in value.parts.items())
    return None if value is None else type(value).__name__


def separate_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    return list(optimizer.parts.values()) if isinstance(optimizer, OptimizerSet) else [optimizer]


def describe_frequencies(every: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} ({'in every step' if number == 1 else f'in every {number} steps'})" for name, number in every.items()
    )


@final
class StepGuard:
    """[Note: steps outside of the trainer]: refuses `step` as long as there is a trainer of the optimizer."""

    def __init__(self) -> None:
        self.trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_allowed = False

    def __call__(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.trainers and not self.is_allowed:
            raise ValueError(
                "optimizer.step() was called outside of Trainer.step, which has made the update already. Leave it out "
                "of the loop, and zero_grad and backward with it. (LS517)"
            )


@contextmanager
def steps_allowed(guards: Sequence[StepGuard]) -> Iterator[None]:
    for guard in guards:
        guard.is_allowed = True
    try:
        yield
    finally:
        for guard in guards:
            guard.is_allowed = False


def guard_steps(optimizer: Optimizer, trainer: Any) -> StepGuard:
    """Return the one guard of an optimizer, which several trainers may share one after the other."""
    hooks = optimizer_step_pre_hooks(optimizer).values()
    guard = next((hook for hook in hooks if isinstance(hook, StepGuard)), None)
    if guard is None:
        guard = StepGuard()
        optimizer.register_step_pre_hook(guard)
    guard.trainers.add(trainer)
    return guard
