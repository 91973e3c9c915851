"""Opening a run: creating its directory, or finding the directory and the checkpoint to continue from.

    no --resume             a new directory
    --resume                the run's own directory, its newest intact checkpoint
    --resume RUN_DIR        that directory, its newest intact checkpoint
    --resume CHECKPOINT     in a run directory: that directory. An error if it has a newer intact checkpoint, because
                            that would belong to other steps. With run_dir=NAME a new directory; the old one is not
                            changed
    --resume OTHER_FILE     a new directory
    resume: auto            the directory of this job, or run_dir, if it is there: its newest intact checkpoint, or the
                            beginning if it has none; else a new directory. See `find_own_run`

When a run continues in its own directory, newer damaged checkpoints are renamed, so that they are never used again.
When a run continues in a new directory, the checkpoint is copied there first.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.atomic_write import atomic_write
from lockstep.checkpoint.step_files import (
    checkpoint_name,
    checkpoints_at,
    find_checkpoints,
    global_step_of,
    is_checkpoint_name,
    peek_manifest,
)
from lockstep.errors import CheckpointError, ConfigError, LaterFormatError, RunDirectoryError, without_code
from lockstep.runs.changes import Change, check_changes
from lockstep.runs.config import Config, apply_overrides, parse_config, placement_overrides
from lockstep.runs.directory import (
    CONFIG_NAME,
    check_may_begin_again,
    find_own_run,
    find_run_directory,
    lock_run,
    make_run_directory,
    note_job,
    read_starts,
    write_config,
)
from lockstep.runs.listing import recorded_config

if TYPE_CHECKING:  # opening a new run needs no torch
    from lockstep.checkpoint.manifest import Manifest

NEWEST = ""
"""Used in place of a path for the newest checkpoint of a run."""

BROKEN_SUFFIX = ".broken"
"""Added to the name of a damaged checkpoint when its run continues from an earlier one."""

_PATIENCE_SECONDS = 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    config: Config
    name: str
    """The name of numbered directories: runs/NAME, runs/NAME-2, ..."""
    resumed: str | None
    """A checkpoint or a run directory to resume from, or `NEWEST`; None for a new run."""
    has_run_dir_override: bool
    allowed: Collection[str]
    """Names given to `--allow`: config keys that may differ from the run's config."""
    job: str | None = None
    """What identifies the job that this process belongs to, for `resume: auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheckpoint:
    run_dir: Path | None
    """The run directory that contains it; None if it is not in a run directory."""
    checkpoint: Path
    manifest: "Manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    run_dir: Path
    """Its directory, locked."""
    origin: SourceCheckpoint | None
    """The checkpoint in `run_dir` to continue from; None for a new run."""
    changes: tuple[Change, ...]


def open_run(wanted: OpenRequest, held: ExitStack, warn: Tell) -> OpenedRun:
    """Open a run (local; call it on one rank); it is locked until `held` is closed."""
    config = wanted.config
    if wanted.resumed is None and config.resume == "auto":
        own = find_own_run(config, wanted.name, wanted.job)
        if own is not None:
            held.enter_context(lock_run(own, _PATIENCE_SECONDS))  # the workers of before may be ending
            if not find_checkpoints(own):
                check_may_begin_again(own, config)
                write_config(own, config)
                return OpenedRun(run_dir=own, origin=None, changes=())
            wanted = replace(wanted, resumed=str(own))
            return _continue(wanted, held, warn, own)
    if wanted.resumed is None:
        run_dir = make_run_directory(config.run_dir, wanted.name)
        held.enter_context(lock_run(run_dir))
        if config.resume == "auto":
            note_job(run_dir, wanted.job)
        write_config(run_dir, config)
        return OpenedRun(run_dir=run_dir, origin=None, changes=())
    return _continue(wanted, held, warn, None)


def with_recorded_shards(wanted: OpenRequest) -> OpenRequest:
    """Return the request with the `num_shards` that its run began with, if its config names none (local)."""
    config, path = wanted.config, None
    if "num_shards" in config.model_fields_set:
        return wanted
    if wanted.resumed is not None:
        path = Path(wanted.resumed) if wanted.resumed else find_run_directory(config.run_dir, wanted.name)
    elif config.resume == "auto":
        path = find_own_run(config, wanted.name, wanted.job)
    if path is None:
        return wanted
    number = recorded_config(path).get("num_shards", config.num_shards)
    return replace(wanted, config=config.model_copy(update={"num_shards": number}))


def _continue(wanted: OpenRequest, held: ExitStack, warn: Tell, locked: Path | None) -> OpenedRun:
    """Continue from a checkpoint; `locked` is the run directory if it is locked already."""
    from lockstep.runs.saving import compare_config

    config = wanted.config
    found = own = _find_directory(wanted)
    if found is not None and locked is None:
        if wanted.has_run_dir_override and not _is_same(found, config.run_dir):
            own = None  # it continues in a new directory
        else:
            held.enter_context(lock_run(found))  # before the search for the newest checkpoint
    origin = _find_source(wanted, found, warn)
    if own is not None:
        _check_no_newer(own, origin)
    changes = compare_config(origin.manifest, config)
    try:
        check_changes(changes, wanted.allowed)
        _check_epochs(origin, config)
    except CheckpointError as error:
        if wanted.resumed:
            raise
        said = str(error).removesuffix(" (LS709)")
        raise CheckpointError(
            f"{said} (--resume without a path took {origin.checkpoint}, the newest checkpoint of the last run named "
            f"{wanted.name!r}. For another give its path: --resume RUN.) (LS709)"
        ) from error
    if own is not None:
        _rename_broken(own, origin, warn)
    else:
        own = make_run_directory(config.run_dir, wanted.name)
        held.enter_context(lock_run(own))
        copy = own / checkpoint_name(origin.manifest.global_step)
        _copy(origin.checkpoint, copy)
        origin = replace(origin, checkpoint=copy)
    write_config(own, config)
    return OpenedRun(run_dir=own, origin=origin, changes=tuple(changes))


def _find_directory(wanted: OpenRequest) -> Path | None:
    if not wanted.resumed:
        return find_run_directory(wanted.config.run_dir, wanted.name)
    path = Path(wanted.resumed)
    checkpoints_at(path)  # it raises where there is none
    if path.is_dir():
        return path
    file = _resolve_links(path)
    return file.parent if is_checkpoint_name(file) and (file.parent / CONFIG_NAME).is_file() else None


def _find_source(wanted: OpenRequest, run_dir: Path | None, warn: Tell) -> SourceCheckpoint:
    from lockstep.checkpoint.file import find_newest_intact, read_manifest

    path = Path(wanted.resumed) if wanted.resumed else run_dir
    assert path is not None
    if path.is_dir():
        checkpoint, manifest = find_newest_intact(
            path, lambda error: warn(f"{without_code(error)} Trying the checkpoint before it. (LS713)")
        )
    else:
        checkpoint = _resolve_links(path)
        manifest = read_manifest(checkpoint)
    return SourceCheckpoint(run_dir=run_dir, checkpoint=checkpoint, manifest=manifest)


def _check_no_newer(run_dir: Path, origin: SourceCheckpoint) -> None:
    newer = [each for each in find_checkpoints(run_dir) if global_step_of(each) > global_step_of(origin.checkpoint)]
    newer_intact = [each.name for each in newer if _is_intact(each)]
    if newer_intact:
        raise RunDirectoryError(
            f"{origin.checkpoint} is not the newest checkpoint of its run: {', '.join(newer_intact)} would not belong "
            f"to the steps that are trained now. Give --resume {run_dir} to continue from the newest, or run_dir=NAME "
            "to continue from this one in a new directory. (LS714)"
        )


def _check_epochs(origin: SourceCheckpoint, config: Config) -> None:
    """Raise if the checkpoint is after the last epoch: its result would be shown as that of fewer epochs."""
    manifest = origin.manifest
    if (manifest.epoch, manifest.step) > (config.epochs, 0):
        raise CheckpointError(
            f"{origin.checkpoint} is at epoch {manifest.epoch + 1}, after step {manifest.step}, but epochs is only "
            f"{config.epochs}: nothing is left to train. Set more epochs, or use an earlier checkpoint. (LS709)"
        )


def _rename_broken(run_dir: Path, origin: SourceCheckpoint, warn: Tell) -> None:
    """Rename the checkpoints that are newer than the one to continue from; all of them are damaged.

    The run will take their steps again. Under their names they would be used as the newest checkpoint at the next
    resume, as the best one, or be counted by `keep`.
    """
    for path in find_checkpoints(run_dir):
        if global_step_of(path) > global_step_of(origin.checkpoint):
            renamed = path.with_name(f"{path.name}{BROKEN_SUFFIX}")
            try:
                path.replace(renamed)
            except OSError as error:
                raise RunDirectoryError(
                    f"The damaged {path} could not be renamed to {renamed}: {error}. (LS713)"
                ) from error
            warn(f"{path} was renamed to {renamed.name}. (LS713)")


def _is_intact(path: Path) -> bool:
    from lockstep.checkpoint.file import read_verified_manifest

    try:
        read_verified_manifest(path)
    except LaterFormatError:
        return True
    except CheckpointError:
        return False
    return True


def _resolve_links(path: Path) -> Path:
    """Return the file that a symbolic link such as best.ckpt points to; other paths unchanged."""
    while path.is_symlink():  # repeatedly: the target may be a link too
        path = path.parent / path.readlink()
    return path


def _is_same(path: Path, other: str | None) -> bool:
    return other is not None and path.resolve() == Path(other).resolve()


def _copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)  # safe, because checkpoints are replaced and never modified in place
    except OSError:
        try:
            with (
                atomic_write(target) as descriptor,
                source.open("rb") as file,
                os.fdopen(os.dup(descriptor), "wb") as copy,
            ):
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise CheckpointError(f"{source} could not be copied to {target}: {error}. (LS703)") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    checkpoint: Path
    config: Config
    code: Path | None
    """The folder of the modules that the config names, if the run directory tells it."""
    where: str
    digest: str
    metrics: Mapping[str, float | None]


def find_saved_run(
    path: Path, overrides: Sequence[str] = (), *, workers: int | None = None, devices: str | None = None
) -> SavedRun:
    """Find the newest checkpoint of a run directory, or take the file itself (local); None: the config's value."""
    checkpoint = checkpoints_at(path)[0]
    manifest = peek_manifest(checkpoint)
    values: Any = manifest.get("config")
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{checkpoint} was saved without a config, by a training loop of its own: call Trainer.load and "
            "Trainer.evaluate there. (LS715)"
        )
    changed = {**json.loads(json.dumps(values)), "on_worker_loss": "stop", "min_workers": 1}
    apply_overrides(changed, [*placement_overrides(changed, workers, devices), *overrides])
    epoch, step = manifest.get("epoch", 0), manifest.get("step", 0)
    return SavedRun(
        checkpoint=checkpoint,
        config=parse_config(changed, str(checkpoint)),
        code=find_code(checkpoint.resolve().parent),
        digest=str(manifest.get("digest")),
        metrics=manifest.get("metrics") or {},
        where=f"after epoch {epoch}" if step == 0 else f"after step {step} of epoch {epoch + 1}",
    )


def search_path(saved: SavedRun, given: Path | None) -> list[str]:
    """Return the folders in which the modules of a run are searched, before the installed packages."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--code {given} is no folder. Name the folder of the modules that the config names. (LS804)")
    folders = [given] if given is not None else [*([saved.code] if saved.code is not None else []), Path.cwd()]
    return [str(folder.resolve()) for folder in folders]


def find_code(run_dir: Path) -> Path | None:
    folder = Path(str(next(iter(read_starts(run_dir)), {}).get("modules", "")))
    return folder if folder.is_absolute() and folder.is_dir() else None
