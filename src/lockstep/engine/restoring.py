"""Loading a state: it is checked before anything is changed, and a failure restores the state before."""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data import Cursor
from lockstep.engine.optimizers import OptimizerSet, SchedulerSet
from lockstep.engine.schedules import Schedule
from lockstep.errors import CheckpointError, LockstepError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import non_persistent_buffer_names

_NEEDED = ("model", "optimizer", "scheduler", "epoch", "step", "global_step", "num_shards", "seed")
SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Options of an optimizer that schedulers set."""


def class_name(value: object) -> str | None:
    """Return the class name to save for an optimizer or a scheduler, whose own state does not hold it."""
    if isinstance(value, OptimizerSet | SchedulerSet):
        return value.kinds
    return None if value is None else type(value).__name__


def check_state(state: Any, expected: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise CheckpointError(
            f"The state has no {', '.join(missing)}: it is not what trainer.state_dict() returns. Save that, for the "
            "state of a model alone does not hold the position of the run; weights alone go into the model, before the "
            "trainer is made. (LS708)"
        )
    for name in ("num_shards", "seed"):
        if state[name] != expected[name]:
            raise CheckpointError(
                f"The state was saved with {name} {state[name]}, and this run has {expected[name]}: the result "
                f"would differ. Set {name} to {state[name]}. (LS708)"
            )
    for name in ("optimizer_class", "scheduler_class"):
        if name in state and state[name] != expected[name]:
            what = name.removesuffix("_class")
            raise CheckpointError(
                f"The state was saved with {what} {state[name]}, and this run has {expected[name]}: the result would "
                f"differ. Make the trainer with the same {what}. (LS708)"
            )
    for name in ("scheduler", "scaler"):
        if bool(state.get(name)) != bool(expected[name]):
            has, lacks = ("The state", "this trainer") if state.get(name) else ("This trainer", "the state")
            raise CheckpointError(
                f"{has} has a {name}, and {lacks} has none: the result would differ. Make the trainer as "
                "it was made when the state was saved. (LS708)"
            )


def option_names(optimizer: Optimizer) -> list[set[str]]:
    """Return which options of its class each group of an optimizer has."""
    return [set(group) & set(optimizer.defaults) for group in optimizer.param_groups]


def check_options(optimizer: Optimizer, before: Sequence[set[str]]) -> None:
    """Check that an optimizer still has its options after it has taken a state, so that the state was of its kind.

    Taking one gives its `defaults` options that its groups may never have had: `before` is what the groups had.
    """
    for group, options in zip(optimizer.param_groups, before, strict=True):
        missing = sorted(options - set(group))
        if missing:
            raise ValueError(
                f"The state is of another optimizer than {type(optimizer).__name__}: "
                f"it has no {', '.join(missing)}. (LS708)"
            )


class Stateful(Protocol):
    """A part of a run that has a state: a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""


@contextmanager
def restored_on_error(model: nn.Module, optimizer: Optimizer, others: Sequence[Stateful | None]) -> Iterator[None]:
    """Give a model, an optimizer and others their state back if the block raises.

    Tensors of the model are copied before; the optimizer's state, which taking another one replaces, is kept.
    An error that is none of ours becomes a `CheckpointError`.
    """
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    before = optimizer.state_dict()
    states = [(each, copy.deepcopy(each.state_dict())) for each in others if each is not None]
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(copies[name])
        optimizer.load_state_dict(before)
        for each, state in states:
            each.load_state_dict(state)
        if isinstance(error, LockstepError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            "The state does not fit this model, optimizer, scheduler or scaler, which are as they were. "
            f"{type(error).__name__}: {error} (LS708)"
        ) from error


@final
class UnsavedBuffers:
    """The buffers that are no part of a model's state (`persistent=False`), as they were at first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._at_first = dict(self._look())

    def changed(self) -> list[str]:
        return [name for name, number in self._look() if self._at_first.get(name, number) != number]

    def _look(self) -> Iterator[tuple[str, int]]:
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in non_persistent_buffer_names(module):
                    yield f"{prefix}.{name}".lstrip("."), int(sum_of_bits([buffer]))


def warn_of_late_scheduler(scheduler: Any, cursor: Cursor) -> None:
    """Warn of a scheduler that the user steps once per epoch and has not stepped for the last epoch."""
    is_between = cursor.step == 0 and cursor.epoch > 0
    if is_between and getattr(scheduler, "last_epoch", None) == cursor.epoch - 1:
        warnings.warn(
            f"The run is saved at the end of epoch {cursor.epoch - 1}, for which the scheduler was not stepped yet: a "
            "run that resumes from here would leave that out. Step it first, then save. (LS711)",
            stacklevel=stacklevel_of_user(),
        )


def describe_schedule(scheduler: Any) -> Description:
    """Return the options with which a scheduler was made, as far as its state holds them: loading replaces them."""
    if isinstance(scheduler, SchedulerSet):
        found = {name: describe_schedule(part) for name, part in scheduler.parts.items()}
        return {f"{option} of {name}": value for name, part in found.items() for option, value in part.items()}
    if scheduler is None:
        return {}
    values = {
        name: value
        for name, value in getattr(scheduler, "__dict__", {}).items()
        if name in _parameters(type(scheduler))
    }
    for each in values.pop("lr_lambdas", []):  # of functions nothing is saved
        values |= each.options() if isinstance(each, Schedule) else getattr(each, "__dict__", {})
    return {name: str(value) for name, value in values.items()}


def _parameters(kind: type) -> set[str]:
    try:
        return {*inspect.signature(kind).parameters, "lr_lambdas"} - {"optimizer", "last_epoch"}
    except (TypeError, ValueError):
        return set()


def warn_of_other_schedule(made: Description, loaded: Description) -> None:
    changed = [name for name in made if made[name] != loaded.get(name, made[name])]
    if changed:
        listed = "; ".join(f"{name} was to be {made[name]} and is {loaded[name]}" for name in changed)
        warnings.warn(
            f"The scheduler continues with the options of the checkpoint: {listed}. The learning rates are those of "
            "the run as it was begun. For others begin a new run. (LS711)",
            stacklevel=stacklevel_of_user(),
        )


def warn_of_other_options(made: Description, loaded: Description) -> None:
    has_schedule = any(name.startswith("initial_lr") for name in loaded)
    changed = [name for name in made if name in loaded and made[name] != loaded[name]]
    odd = [name for name in changed if not (has_schedule and name.partition(" ")[0] in SCHEDULED)]
    if odd:
        listed = "; ".join(f"{name} was to be {made[name]} and is {loaded[name]}" for name in odd)
        warnings.warn(
            f"The optimizer continues with the options of the checkpoint: {listed}. To change one, set it in "
            "optimizer.param_groups after loading. (LS711)",
            stacklevel=stacklevel_of_user(),
        )
