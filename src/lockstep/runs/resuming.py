"""Restoring a run from a checkpoint, with changes to its config that were allowed."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import Checkpoint, Manifest
from lockstep.checkpoint.manifest import decode_state
from lockstep.engine.saving import describe_schedule, split_scheduler_state, unpack_state, warn_of_other_schedule
from lockstep.errors import CheckpointError
from lockstep.runs.build import RunParts
from lockstep.runs.changes import ALL, MAKES_BATCHES, Change, check_changes, find_changes
from lockstep.runs.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    path: Path
    allowed: frozenset[str]
    """Names given to `--allow`: config keys that may differ, although they change the results."""
    epoch_loss: float
    """Sum of loss times weight over the steps of the interrupted epoch before the checkpoint."""
    epoch_weight: float


def compare_config(manifest: Manifest, config: Config) -> list[Change]:
    """Return the differences between a config and the config in a checkpoint; empty if the checkpoint has none."""
    now = json.loads(config.model_dump_json())
    return find_changes(manifest.config or {}, now, is_mid_epoch=manifest.step > 0)


def restore_run(parts: RunParts, checkpoint: Checkpoint, config: Config, allowed: Collection[str] = ()) -> None:
    """Restore the objects of a run from a checkpoint (local: every worker calls, with the same file)."""
    changes = compare_config(checkpoint.manifest, config)
    check_changes(changes, allowed)
    _check_data(checkpoint.manifest, parts.train.source, {change.key for change in changes}, allowed)
    trainer = parts.trainer
    options = [dict(group) for group in trainer.optimizer.param_groups]
    schedule = describe_schedule(parts.scheduler)
    own = parts.scheduler if trainer.scheduler is None else None
    state, scheduler = split_scheduler_state(
        unpack_state(checkpoint), has_scheduler=trainer.scheduler is not None, own=own
    )
    if checkpoint.manifest.step == 0:  # between epochs the loader may change, if this was allowed
        state["loader"] = None
    if checkpoint.manifest.config is not None:  # which callbacks there are may have changed, where that was allowed
        mine = trainer.moments.callbacks
        known = {name: each for name, each in state["callbacks"].items() if name in mine.names}
        state["callbacks"] = {**mine.state_dict(), **known}
    trainer.load_state_dict(state)
    if own is not None and scheduler is not None:
        own.load_state_dict(scheduler)
    states = decode_state(checkpoint.manifest.extra or {}, checkpoint.optimizer)
    for name, each in parts.states.items():
        if name in states:
            each.load_state_dict(states[name])
    if trainer.world.rank == 0:  # the number of steps follows from the data, too
        warn_of_other_schedule(schedule, describe_schedule(parts.scheduler))
    for change in changes:
        if change.key == "optimizer_args":
            _set_option(change.name, options, trainer.optimizer.param_groups)


def _check_data(manifest: Manifest, source: str, changed: Collection[str], allowed: Collection[str]) -> None:
    """Check that the batches are the same as in the saved run, or that they may change here."""
    if manifest.loader is None or manifest.loader == source:
        return
    differs = f"The run was trained on {manifest.loader}, but the data are now {source}"
    if manifest.step > 0:
        raise CheckpointError(
            f"{differs}. The checkpoint was written in the middle of an epoch, where this cannot change: samples would "
            "be used twice or not at all. Restore the data, or resume from a checkpoint written at the end of an "
            "epoch. (LS710)"
        )
    if not (MAKES_BATCHES & set(changed) or {"data", ALL} & set(allowed)):
        raise CheckpointError(
            f"{differs}. This changes the results of the run. Restore the data; to change them from here on, "
            "give --allow data; or start a new run. (LS710)"
        )


def _set_option(name: str, made: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Set an optimizer option to its new value again, after loading the state has replaced it."""
    option = name.split(".")[1] if "." in name else ""
    if not all(option in group for group in made):
        raise CheckpointError(
            f"{name} cannot be changed when a run is resumed: it is not an option of the optimizer's parameter groups, "
            "whose state the checkpoint contains. Restore the old value, or start a new run. (LS709)"
        )
    for group, fresh in zip(groups, made, strict=True):
        group[option] = fresh[option]
