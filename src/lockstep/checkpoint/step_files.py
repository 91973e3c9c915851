"""Checkpoints by the name of the step that they were written after: `step-00000132.ckpt`."""

import re
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.file import read_verified_manifest
from lockstep.checkpoint.manifest import Manifest
from lockstep.errors import CheckpointError, LaterFormatError

_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


def checkpoint_name(global_step: int) -> str:
    """Return what the checkpoint after so many updates is called."""
    return f"step-{global_step:08d}.ckpt"


def is_checkpoint_name(path: Path) -> bool:
    """Return whether a file is called as a checkpoint of a run is."""
    return _CHECKPOINT.fullmatch(path.name) is not None


def global_step_of(path: Path) -> int:
    """Return how many updates are behind a checkpoint, of which `is_checkpoint_name` holds."""
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first."""
    numbered = {global_step_of(path): path for path in folder.iterdir() if is_checkpoint_name(path)}
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def find_last_by_name(folder: Path) -> Path | None:
    """Return the checkpoint of a run after the most steps, by its file name alone; None if there is none."""
    return next(iter(find_checkpoints(folder)), None)


def find_newest_intact(folder: Path, on_damaged: Callable[[CheckpointError], None]) -> tuple[Path, Manifest]:
    """Return the newest checkpoint of which every byte is as it was written.

    Args:
        folder: Where they are.
        on_damaged: Told of each newer one that cannot.

    Raises:
        CheckpointError: There is none.
        LaterFormatError: A newer one is of a later format, and so perhaps whole.
    """
    found = find_checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint. Name a file, or a directory in which a run has saved.")
    for path in found:
        try:
            return path, read_verified_manifest(path)
        except LaterFormatError:
            raise
        except CheckpointError as error:
            if path == found[-1]:
                raise
            on_damaged(error)
    raise AssertionError("the last one is returned, or raised for")
