"""What `Trainer.save` and `Trainer.load` do, and what they warn of."""

import inspect
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import Checkpoint
from lockstep.checkpoint.manifest import decode_state
from lockstep.comm import World
from lockstep.data import Cursor
from lockstep.engine.arguments import warn_of_other_conditions
from lockstep.engine.batches import gather_results
from lockstep.engine.optimizers import SchedulerSet
from lockstep.engine.run_state import RunState
from lockstep.engine.schedules import Schedule
from lockstep.engine.state_file import (
    LoadedState,
    Scheduler,
    pack_state,
    raise_on_all_ranks,
    read_on_all_ranks,
    split_scheduler_state,
    unpack_state,
    write_on_rank_0,
)
from lockstep.engine.state_parts import ObjectPart, Stateful, StatePart
from lockstep.errors import CheckpointError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description, describe_options

SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Options of an optimizer that schedulers set."""


def save_state(
    state: RunState,
    world: World,
    path: Path,
    scheduler: Scheduler | LRScheduler | None,
    metrics: Mapping[str, float],
    extra: Mapping[str, Stateful],
) -> Path:
    """Write a state into one file and return its path (collective); `Trainer.save` says what it raises."""
    _check_extra(extra)
    _check_scheduler(state, scheduler)
    gather_results(world, state.check_usable, "Trainer.save")
    if world.rank == 0:
        warn_of_late_scheduler(scheduler, state.cursor)

    def take() -> Checkpoint:
        return pack_state(state.to_dict(), state.scheduler if scheduler is None else scheduler, None, metrics, extra)

    return write_on_rank_0(world, path, take)


def load_state(
    state: RunState,
    world: World,
    path: Path,
    scheduler: Scheduler | LRScheduler | None,
    extra: Mapping[str, Stateful],
) -> LoadedState:
    """Resume from a file (collective); `Trainer.load` says what it raises."""
    _check_scheduler(state, scheduler)
    _check_extra(extra)
    file, checkpoint = read_on_all_ranks(world, path)
    options = describe_options(state.optimizer)
    stepped = state.scheduler if scheduler is None else scheduler
    schedule = describe_schedule(stepped)
    with ExitStack() as restored_on_error:

        def restore() -> None:
            own, of_scheduler = split_scheduler_state(
                unpack_state(checkpoint), has_scheduler=state.scheduler is not None, own=scheduler
            )
            states = decode_state(checkpoint.manifest.extra or {}, checkpoint.optimizer)
            _check_same_extra(states, extra)
            others: list[StatePart] = [ObjectPart(f"extra {name}", each) for name, each in extra.items()]
            own |= {f"extra {name}": each for name, each in states.items()}
            if scheduler is not None:
                others.append(ObjectPart("the loop's scheduler", scheduler))
                own["the loop's scheduler"] = of_scheduler
            restored_on_error.enter_context(state.restored_from(own, others))

        raise_on_all_ranks(world, restore, "loading a checkpoint")
    if world.rank == 0:  # one warning is enough
        warn_of_other_conditions(checkpoint.manifest.fingerprint, state.fingerprint())
        warn_of_other_options(options, describe_options(state.optimizer))
        warn_of_other_schedule(schedule, describe_schedule(stepped))
    metrics = checkpoint.manifest.metrics
    return LoadedState(path=file, cursor=state.cursor, global_step=state.global_step, metrics=metrics)


def _check_extra(extra: Mapping[str, Stateful]) -> None:
    for name, each in extra.items():
        if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"extra[{name!r}] is a {type(each).__name__}, expected an object with state_dict and "
                "load_state_dict. (LS708)"
            )


def _check_same_extra(saved: Mapping[str, Any], extra: Mapping[str, Stateful]) -> None:
    if saved.keys() != extra.keys():
        raise CheckpointError(
            f"The checkpoint holds extra state of {', '.join(saved) or 'nothing'}, and load was given "
            f"{', '.join(extra) or 'none'}. Give load the objects that save was given: "
            "trainer.load(path, extra={name: object}). (LS708)"
        )


def _check_scheduler(state: RunState, scheduler: Scheduler | LRScheduler | None) -> None:
    if scheduler is not None and state.scheduler is not None:
        raise ValueError(
            "The trainer steps a scheduler, whose state is a part of its own. Leave scheduler= out; it is for one "
            "that you step yourself. (LS708)"
        )


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
