"""File names of checkpoints. `step-00000132.ckpt` was written after 132 steps of the run."""

import json
import re
import struct
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError

MANIFEST_KEY = "lockstep"
"""Key of the manifest in the `__metadata__` of the safetensors header."""
_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20


def checkpoint_name(global_step: int) -> str:
    return f"step-{global_step:08d}.ckpt"


def is_checkpoint_name(path: Path) -> bool:
    return _CHECKPOINT.fullmatch(path.name) is not None


def global_step_of(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the one after the most steps first."""
    numbered = {global_step_of(path): path for path in folder.iterdir() if is_checkpoint_name(path)}
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, the newest first, or the file itself; CheckpointError without any."""
    found = find_checkpoints(path) if path.is_dir() else [path] if path.is_file() else []
    if found:
        return found
    raise CheckpointError(
        f"{path} holds no checkpoint. Name a checkpoint, or the directory of a run that has saved one. (LS701)"
        if path.is_dir()
        else f"There is no checkpoint or run directory {path}. `lockstep runs` lists the runs that there are. (LS701)"
    )


def find_last_by_name(folder: Path) -> Path | None:
    """Return the checkpoint of a run after the most steps, by its file name alone; None if there is none."""
    return next(iter(find_checkpoints(folder)), None)


def peek_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest as JSON values, without torch and unchecked: for lists of many runs (local)."""
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("it is no safetensors file")  # noqa: TRY301 - one handler for all errors
            manifest = json.loads(json.loads(file.read(length))["__metadata__"][MANIFEST_KEY])
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint of Lockstep: {error}. (LS702)") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} cannot be read as a checkpoint of Lockstep: its manifest is damaged. (LS702)")
    return manifest
