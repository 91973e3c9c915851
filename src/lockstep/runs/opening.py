"""Opening a run: making its directory, or finding the one to go on in and the checkpoint to go on from.

    nothing wanted          a new directory
    newest                  the run's own directory, its newest whole checkpoint
    a run directory         that one, its newest whole checkpoint
    a checkpoint in a run   that run's directory, if no newer checkpoint is in it: it would be of another history. With
                            run_dir=NAME a new directory, and the old one stays as it is
                            (In both cases newer ones that are broken are renamed, so that they never count again.)
    any other checkpoint    a new directory

A new directory that goes on from a checkpoint gets it first of all, so that from then on it is a run as any other.
"""

import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import Manifest, read_manifest, read_verified_manifest
from lockstep.checkpoint.atomic_write import atomic_write
from lockstep.checkpoint.step_files import (
    checkpoint_name,
    find_checkpoints,
    find_newest_intact,
    global_step_of,
    is_checkpoint_name,
)
from lockstep.errors import CheckpointError, LaterFormatError, RunDirectoryError
from lockstep.runs.changes import Change, check_changes
from lockstep.runs.config import Config
from lockstep.runs.resuming import compare_config
from lockstep.runs.run_directory import CONFIG_NAME, find_run_directory, make_run_directory, write_config
from lockstep.runs.run_lock import lock_run

NEWEST = ""
"""Stands for the path of a run's newest checkpoint."""

BROKEN_SUFFIX = ".broken"
"""Added to the name of a checkpoint that is broken, where its run goes on from one before."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """What a user says of the run to open."""

    config: Config
    """The run's."""
    name: str
    """What a numbered directory is called."""
    resumed: str | None
    """A checkpoint or a run directory to go on from, or `NEWEST`; None for a new run."""
    has_run_dir_override: bool
    """Whether the user has asked for the config's run_dir with this very command."""
    allowed: Collection[str]
    """Config keys that may be other than they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheckpoint:
    """From where a run goes on."""

    run_dir: Path | None
    """The run directory in which the checkpoint lies; None if it lies elsewhere."""
    checkpoint: Path
    """The file."""
    manifest: Manifest
    """What it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is open."""

    run_dir: Path
    """Its directory, locked."""
    origin: SourceCheckpoint | None
    """From where it goes on; `checkpoint` lies in `run_dir`. None for a new run."""
    changes: tuple[Change, ...]
    """What differs in its config since."""


def open_run(wanted: OpenRequest, held: ExitStack, warn: Tell) -> OpenedRun:
    """Open a run (local; call it on one rank).

    Args:
        wanted: What the user says.
        held: As long as it is open, the run's directory is locked.
        warn: Told of checkpoints that are broken.

    Raises:
        CheckpointError: There is none to go on from, it cannot be read or copied, or the config differs in what may not
            change.
        RunDirectoryError: There is no such directory, it exists already, another training is in it, or a newer
            checkpoint than the one wanted.
    """
    config = wanted.config
    if wanted.resumed is None:
        run_dir = make_run_directory(config.run_dir, wanted.name)
        held.enter_context(lock_run(run_dir))
        write_config(run_dir, config)
        return OpenedRun(run_dir=run_dir, origin=None, changes=())
    found = _find_directory(wanted)
    needs_new_directory = found is None or (wanted.has_run_dir_override and not _is_same(found, config.run_dir))
    if found is not None and not needs_new_directory:
        held.enter_context(lock_run(found))  # before anybody looks for the newest
    origin = _find_source(wanted, found, warn)
    if found is not None and not needs_new_directory:
        _check_no_newer(found, origin)
    changes = compare_config(origin.manifest, config)
    check_changes(changes, wanted.allowed)
    _check_epochs(origin, config)
    if found is not None and not needs_new_directory:
        run_dir = found
        _rename_broken(found, origin, warn)
    else:
        run_dir = make_run_directory(config.run_dir, wanted.name)
        held.enter_context(lock_run(run_dir))
        own = run_dir / checkpoint_name(origin.manifest.global_step)
        _copy(origin.checkpoint, own)
        origin = SourceCheckpoint(run_dir=origin.run_dir, checkpoint=own, manifest=origin.manifest)
    write_config(run_dir, config)
    return OpenedRun(run_dir=run_dir, origin=origin, changes=tuple(changes))


def _find_directory(wanted: OpenRequest) -> Path | None:
    """Return the run directory in which the checkpoint lies that a run is to go on from, or None."""
    if not wanted.resumed:
        return find_run_directory(wanted.config.run_dir, wanted.name)
    path = Path(wanted.resumed)
    if path.is_dir():
        if not find_checkpoints(path):
            raise RunDirectoryError(
                f"{path} holds no checkpoint to resume from. Name a checkpoint, or the directory of a run that has "
                "saved one."
            )
        return path
    if not path.is_file():
        raise CheckpointError(
            f"There is no checkpoint or run directory {path} to resume from. Without a path --resume takes the newest "
            "checkpoint of the run."
        )
    file = _resolve_links(path)
    return file.parent if is_checkpoint_name(file) and (file.parent / CONFIG_NAME).is_file() else None


def _find_source(wanted: OpenRequest, run_dir: Path | None, warn: Tell) -> SourceCheckpoint:
    path = Path(wanted.resumed) if wanted.resumed else run_dir
    assert path is not None
    if path.is_dir():
        checkpoint, manifest = find_newest_intact(path, lambda error: warn(f"{error} Going on from the one before."))
    else:
        checkpoint = _resolve_links(path)
        manifest = read_manifest(checkpoint)
    return SourceCheckpoint(run_dir=run_dir, checkpoint=checkpoint, manifest=manifest)


def _check_no_newer(run_dir: Path, origin: SourceCheckpoint) -> None:
    """Refuse to go on in a directory from a checkpoint that is not the newest whole one there."""
    newer = [each for each in find_checkpoints(run_dir) if global_step_of(each) > global_step_of(origin.checkpoint)]
    whole = [each.name for each in newer if _is_intact(each)]
    if whole:
        raise RunDirectoryError(
            f"{origin.checkpoint} is not the newest checkpoint of its run: {', '.join(whole)} would be of another "
            f"history than what is trained now. Say --resume {run_dir} to go on from the newest; or run_dir=NAME to go "
            "on from this one in a new directory, and leave the old one as it is."
        )


def _check_epochs(origin: SourceCheckpoint, config: Config) -> None:
    """Refuse to end before where a run stands: its result would be shown as that of fewer epochs."""
    manifest = origin.manifest
    if (manifest.epoch, manifest.step) > (config.epochs, 0):
        raise CheckpointError(
            f"{origin.checkpoint} stands in epoch {manifest.epoch + 1}, after step {manifest.step}, and epochs is "
            f"{config.epochs}: nothing is left to train. Give more epochs, or an earlier checkpoint."
        )


def _rename_broken(run_dir: Path, origin: SourceCheckpoint, warn: Tell) -> None:
    """Rename checkpoints newer than the one gone on from, all of them broken.

    Under their names they would stand for steps that are about to be taken anew: as the newest at the next resume, as
    the best, or among those that `keep` counts.
    """
    for path in find_checkpoints(run_dir):
        if global_step_of(path) > global_step_of(origin.checkpoint):
            renamed = path.with_name(f"{path.name}{BROKEN_SUFFIX}")
            try:
                path.replace(renamed)
            except OSError as error:
                raise RunDirectoryError(f"The broken {path} could not be renamed to {renamed}: {error}.") from error
            warn(f"{path} is called {renamed.name} now.")


def _is_intact(path: Path) -> bool:
    try:
        read_verified_manifest(path)
    except LaterFormatError:
        return True
    except CheckpointError:
        return False
    return True


def _resolve_links(path: Path) -> Path:
    """Return the checkpoint that best.ckpt points to, in the same directory; a path that is no link as it is."""
    while path.is_symlink():  # a link to best.ckpt is one, too
        path = path.parent / path.readlink()
    return path


def _is_same(path: Path, other: str | None) -> bool:
    return other is not None and path.resolve() == Path(other).resolve()


def _copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)  # a checkpoint is replaced, never written into
    except OSError:
        try:
            with (
                atomic_write(target) as descriptor,
                source.open("rb") as file,
                os.fdopen(os.dup(descriptor), "wb") as copy,
            ):
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise CheckpointError(f"{source} could not be copied to {target}: {error}.") from error
