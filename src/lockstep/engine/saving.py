"""What `Trainer.save` and `Trainer.load` do."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import Checkpoint
from lockstep.checkpoint.manifest import decode_state
from lockstep.comm import World
from lockstep.engine.arguments import warn_of_other_conditions
from lockstep.engine.batches import gather_results
from lockstep.engine.restoring import (
    Stateful,
    describe_schedule,
    warn_of_late_scheduler,
    warn_of_other_options,
    warn_of_other_schedule,
)
from lockstep.engine.run_state import RunState
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
from lockstep.errors import CheckpointError
from lockstep.reduce.model import describe_options


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
            restored_on_error.enter_context(state.restored_from(own, scheduler, of_scheduler, list(extra.values())))
            for name, each in extra.items():
                each.load_state_dict(states[name])

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
