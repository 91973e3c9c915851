"""Bringing a run to where a checkpoint was written, with the changes to its config that were allowed."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import Checkpoint, Manifest
from lockstep.engine.state_file import share_out, unpack_state
from lockstep.errors import CheckpointError
from lockstep.runs.build import RunParts
from lockstep.runs.changes import ALL, Change, check_changes, find_changes
from lockstep.runs.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """From what a run goes on."""

    path: Path
    """The checkpoint."""
    allowed: frozenset[str]
    """Config keys that may be other than they were, though they change what comes out."""
    epoch_loss: float
    """Of the epoch that was under way: the summed loss of its steps so far, each times its weight."""
    epoch_weight: float
    """Their summed weight."""


def compare_config(manifest: Manifest, config: Config) -> list[Change]:
    """Return how a config differs from that of the run that a checkpoint belongs to; empty if that had none."""
    now = json.loads(config.model_dump_json())
    return find_changes(manifest.config or {}, now, is_mid_epoch=manifest.step > 0)


def restore_run(parts: RunParts, checkpoint: Checkpoint, config: Config, allowed: Collection[str] = ()) -> None:
    """Bring what a config has made to where a checkpoint was written (local: every worker calls, with the same file).

    Args:
        parts: What the config has made.
        checkpoint: Where the run stood.
        config: The run's.
        allowed: Config keys that may be other than they were, though they change what comes out.

    Raises:
        CheckpointError: The checkpoint is of another model or another run.
    """
    changes = compare_config(checkpoint.manifest, config)
    check_changes(changes, allowed)
    _check_data(checkpoint.manifest, parts.train.source, {change.key for change in changes}, allowed)
    trainer = parts.trainer
    options = [dict(group) for group in trainer.optimizer.param_groups]
    own = parts.scheduler if trainer.scheduler is None else None
    state, scheduler = share_out(unpack_state(checkpoint), has_scheduler=trainer.scheduler is not None, own=own)
    if checkpoint.manifest.step == 0:  # what was allowed to change may change here
        state["loader"] = None
    trainer.load_state_dict(state)
    if own is not None and scheduler is not None:
        own.load_state_dict(scheduler)
    for change in changes:
        if change.key == "optimizer_args":
            _set_option(change.name, options, trainer.optimizer.param_groups)


def _check_data(manifest: Manifest, source: str, changed: Collection[str], allowed: Collection[str]) -> None:
    """Check that the data are cut as they were, or may be cut otherwise from here on."""
    if manifest.loader is None or manifest.loader == source:
        return
    differs = f"The run was trained on {manifest.loader}, and the data are {source} now"
    if manifest.step > 0:
        raise CheckpointError(
            f"{differs}. The checkpoint stands in the middle of an epoch, where this cannot change: samples would be "
            "seen twice, or never. Bring the data back, or go on from a checkpoint of an epoch's end."
        )
    if not ({"batch_size", "data", "data_args"} & set(changed) or {"data", ALL} & set(allowed)):
        raise CheckpointError(
            f"{differs}. This changes what comes out of the run. Bring the data back; to change them from here on, "
            "say --allow data; or begin a new run."
        )


def _set_option(name: str, made: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Give an option of the optimizer its new value, which the old state has just replaced."""
    option = name.split(".")[1] if "." in name else ""
    if not all(option in group for group in made):
        raise CheckpointError(
            f"{name} cannot be changed when a run goes on: it is no option of the optimizer's parameter groups, whose "
            "state the checkpoint holds. Set it back, or begin a new run."
        )
    for group, fresh in zip(groups, made, strict=True):
        group[option] = fresh[option]
