"""Writing checkpoints into a run directory, removing old ones, and restoring a run from one.

Rank 0 writes, and if it is lost, the next rank 0. A checkpoint in the background is written while the training
continues, so when rank 0 is lost the state to write may be gone. So rank 1 keeps a copy of it too, where a run
continues without lost workers. If both are lost, the next rank 0 writes the state that it has.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lockstep.checkpoint.atomic_write import remove_stale_temp_files
from lockstep.checkpoint.file import read_manifest
from lockstep.checkpoint.manifest import Checkpoint, Manifest, decode_state
from lockstep.checkpoint.saver import Saver, StateCopy
from lockstep.checkpoint.step_files import checkpoint_name, find_checkpoints, global_step_of
from lockstep.comm import World
from lockstep.engine.batches import gather_results
from lockstep.engine.saving import (
    describe_schedule,
    pack_state,
    split_scheduler_state,
    unpack_state,
    warn_of_other_schedule,
)
from lockstep.engine.stopping import mode_of_name
from lockstep.errors import CheckpointError, ConfigError
from lockstep.events import CheckpointSaved, Recorder
from lockstep.runs.build import RunParts
from lockstep.runs.changes import ALL, MAKES_BATCHES, Change, check_changes, find_changes
from lockstep.runs.config import Config
from lockstep.runs.directory import link_best_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """A save that was begun, by this worker or another one."""

    global_step: int
    metrics: Mapping[str, float]
    copy: Checkpoint | None
    """The state, if this worker keeps it for the case that rank 0 is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    global_step: int
    is_intact: bool
    """Whether its header is intact and its length right."""
    score: float | None


@final
class RunSaver:
    """Write the checkpoints of one run. Use it on every worker, within `writing`, which waits for the last save.

    The worker that writes removes temporary files of killed processes first, because they may fill the disk.
    """

    def __init__(self, config: Config, run_dir: Path, recorder: Recorder, parts: RunParts) -> None:
        self._config = config
        self._run_dir = run_dir
        self._recorder = recorder
        self._parts = parts
        self.writing = Saver(is_async=config.async_save, on_error=config.on_save_error, on_saved=self._tell)
        self._writes = False
        self._last: _Due | None = None
        self._copy = StateCopy()

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint (every worker calls; collective if it is not written in the background).

        An error of the previous save in the background is raised here. Earlier checkpoints are intact.
        """
        trainer = self._parts.trainer
        if self._config.async_save or not trainer.internals.can_continue:
            self._save_in_background(metrics)
            return

        def write() -> None:
            if trainer.world.rank == 0:
                self._write(self._checkpoint(metrics))

        def save(world: World) -> None:
            with trainer.internals.sharing.collected(world, [0]):
                gather_results(world, write, "saving a checkpoint")

        trainer.repeatable(save)

    def take_over(self, world: World) -> None:
        """Write the last checkpoint, if this worker is rank 0 now and the one before has not written it (local).

        The state that this worker has may be of a later step.
        """
        due = self._last
        if world.rank != 0 or self._writes or due is None:
            return
        path = self._run_dir / checkpoint_name(due.global_step)
        if path.exists():  # a file with this name is complete; what follows a save may not be
            self._begin_to_write()
            self._clear_up(path)
        elif due.copy is not None:
            self._write(due.copy)
            self._copy = StateCopy()  # the saver has one of its own
        elif not self._parts.trainer.internals.sharing:  # else the next save is the first that workers make together
            self._write(self._checkpoint(due.metrics if due.global_step == self._parts.trainer.global_step else {}))

    @property
    def path(self) -> Path:
        """Where a checkpoint of the present state is, if it is saved."""
        return self._run_dir / checkpoint_name(self._parts.trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return which save was begun last (local), for a worker that joins: it may have to write it."""
        due = self._last
        return {} if due is None else {"global_step": due.global_step, "metrics": dict(due.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = _Due(**state, copy=None) if state else None

    def _save_in_background(self, metrics: Mapping[str, float]) -> None:
        trainer = self._parts.trainer
        self._last = None  # its memory is used again
        if trainer.internals.sharing:
            trainer.repeatable(lambda world: self._take_state(metrics, world))
        else:
            self._take_state(metrics, trainer.world)

    def _take_state(self, metrics: Mapping[str, float], world: World) -> None:
        """Begin to write the present state, or copy it (collective where the optimizer is shared)."""
        trainer, rank = self._parts.trainer, world.rank
        copies = rank == 1 and trainer.internals.can_continue
        with trainer.internals.sharing.collected(world, [0, 1] if trainer.internals.can_continue else [0]):
            if rank == 0 or copies:
                checkpoint = self._checkpoint(metrics)
        if rank == 0:
            self._write(checkpoint)
        copy = self._keep_copy(checkpoint) if copies else None
        self._last = _Due(global_step=trainer.global_step, metrics=metrics, copy=copy)

    def _checkpoint(self, metrics: Mapping[str, float | None]) -> Checkpoint:
        parts, values = self._parts, json.loads(self._config.model_dump_json())
        return pack_state(parts.trainer.internals.state_dict(), parts.scheduler, values, metrics, parts.states)

    def _keep_copy(self, checkpoint: Checkpoint) -> Checkpoint | None:
        try:
            return self._copy.copy_of(checkpoint)
        except RuntimeError:  # no memory for it; if rank 0 is lost as well, a later state is written
            return None

    def _write(self, checkpoint: Checkpoint) -> None:
        self._begin_to_write()
        path = self._run_dir / checkpoint_name(checkpoint.manifest.global_step)
        self.writing.save(path, checkpoint, self._clear_up)

    def _begin_to_write(self) -> None:
        if not self._writes:
            self._writes = True
            with suppress(OSError):  # the first save will raise if the directory is not usable
                remove_stale_temp_files(self._run_dir)

    def _tell(self, path: Path) -> None:
        self._recorder.record(CheckpointSaved(path=path, global_step=global_step_of(path)))

    def _clear_up(self, written: Path) -> None:
        """Link best.ckpt to the best checkpoint, then remove old ones; called after each save."""
        try:
            found = {self._describe(path): path for path in find_checkpoints(self._run_dir)}
            best = find_best(list(found))
            if best is not None:
                link_best_checkpoint(self._run_dir, found[best])
            for old in choose_checkpoints_to_remove(list(found), self._config.keep, global_step_of(written)):
                found[old].unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"Old checkpoints in {self._run_dir} could not be removed: {error}. (LS703)"
            ) from error

    def _describe(self, path: Path) -> SavedCheckpoint:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return SavedCheckpoint(global_step=global_step_of(path), is_intact=False, score=None)
        score = score_of(manifest.metrics, self._config.keep_best)
        return SavedCheckpoint(global_step=global_step_of(path), is_intact=True, score=score)


def choose_checkpoints_to_remove(saved: Sequence[SavedCheckpoint], keep: int, written: int) -> list[SavedCheckpoint]:
    """Return the checkpoints to remove, after the one with `written` updates was saved.

    The newest `keep` checkpoints are kept, and the best one by a metric. A damaged file does not count as one of them.
    It is removed when `keep` intact ones are newer. So the only intact checkpoint is never removed. Those with more
    updates are left: the run was resumed before them, and overwrites them when it is there again.
    """
    newest_first = sorted((each for each in saved if each.global_step <= written), key=lambda each: -each.global_step)
    best = find_best(saved)
    removed: list[SavedCheckpoint] = []
    num_intact = 0
    for each in newest_first:
        if num_intact >= keep and each is not best:
            removed.append(each)
        num_intact += each.is_intact
    return removed


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the best intact checkpoint, the oldest if scores are equal; None if no score is known."""
    scored = [(each.score, -each.global_step, each) for each in saved if each.is_intact and each.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def score_of(metrics: Mapping[str, float | None], wanted: str | None) -> float | None:
    """Return the score of a checkpoint, higher is better; None if it is not known. `wanted` is as `keep_best`."""
    if wanted is None:
        return None
    value = metrics.get(wanted.removeprefix("-"))
    if value is None or not math.isfinite(value):
        return None
    return -value if wanted.startswith("-") or mode_of_name(wanted) == "min" else value


def check_metric_name(wanted: str | None, measured: Collection[str]) -> None:
    """Check that the metric of `keep_best` was measured, and that its sign does not contradict its name."""
    if wanted is None:
        return
    name = wanted.removeprefix("-")
    if name not in measured:
        known = [way for each in measured for way in ([each] if mode_of_name(each) else [each, f"-{each}"])]
        raise not_measured("keep_best", wanted, known)
    if wanted != name and mode_of_name(name) == "max":
        raise ConfigError(f"keep_best is {wanted!r}, which would keep the lowest {name}. Write {name!r}. (LS808)")


def not_measured(key: str, wanted: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(wanted, known, n=1)
    return ConfigError(
        f"{key} is {wanted!r}, but no such metric is measured. "
        + (f"Did you mean {near[0]!r}? " if near else "")
        + ("" if known else "It needs a set to evaluate: data returned the training set alone")
        + (f"Expected {' or '.join(known)}" if known else "")
        + ("; - means that lower is better." if any(each.startswith("-") for each in known) else ".")
        + " (LS808)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    path: Path
    allowed: frozenset[str]
    """Names given to `--allow`: config keys that may differ, although they change the results."""
    epoch_loss: float
    """Sum of loss times weight over the steps of the interrupted epoch before the checkpoint."""
    epoch_weight: float


def compare_config(manifest: Manifest, config: Config) -> list[Change]:
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
        mine = trainer.internals.moments.callbacks
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
