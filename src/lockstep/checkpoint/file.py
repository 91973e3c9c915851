"""Writing a checkpoint so that it is whole or not there, and reading it back."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint.manifest import Checkpoint, Manifest
from lockstep.errors import CheckpointError

MANIFEST_KEY = "lockstep"
"""Where the manifest stands in the metadata of the safetensors header."""
OPTIMIZER_PREFIX = "optimizer/"
"""What the names of tensors that are not the model's begin with."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path`, whole or not at all (local; call it on one rank).

    The file is written beside its final name, flushed to disk and renamed; then the directory is flushed.

    Raises:
        CheckpointError: The disk is full, the directory cannot be written, or a model tensor has a reserved name.
            Whatever was under `path` before is still there.
    """
    for name in checkpoint.model:
        if name.startswith(OPTIMIZER_PREFIX):
            raise CheckpointError(f"The model has a tensor named {name!r}; names under {OPTIMIZER_PREFIX!r} are taken.")
    tensors = {name: _plain(tensor) for name, tensor in {**checkpoint.model, **checkpoint.optimizer}.items()}
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, beside, metadata={"format": "pt", MANIFEST_KEY: checkpoint.manifest.to_json()})
        beside.chmod(_usual_mode(path.parent))
        _flush(beside)
        beside.replace(path)
        _flush(path.parent)
    except KeyError as error:  # safetensors has no name for the dtype
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error} is not a dtype it can hold."
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error}. Any checkpoint written before is "
            "whole: make room, then go on with --resume."
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint; nothing in it is executed (local).

    Args:
        path: A file that `save_checkpoint` wrote.
        device: Where the tensors go.

    Raises:
        CheckpointError: No such file, truncated, not a checkpoint of Lockstep, or of a later format.
    """
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    with _opened(path, device) as file:
        manifest = _manifest_of(file, path)
        for name in file.keys():  # noqa: SIM118 - the reader is not a mapping
            (optimizer if name.startswith(OPTIMIZER_PREFIX) else model)[name] = file.get_tensor(name)
    return Checkpoint(model=model, optimizer=optimizer, manifest=manifest)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and none of its tensors (local).

    Raises:
        CheckpointError: As `load_checkpoint`.
    """
    with _opened(path, "cpu") as file:
        return _manifest_of(file, path)


@contextmanager
def _opened(path: Path, device: torch.device | str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}.") from error


def _manifest_of(file: Any, path: Path) -> Manifest:
    text = (file.metadata() or {}).get(MANIFEST_KEY)
    if text is None:
        raise CheckpointError(
            f"{path} is a safetensors file without a Lockstep manifest, so no run can resume from it."
        )
    return Manifest.from_json(text)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor as safetensors wants it: on the CPU, contiguous, with memory of its own."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()


def _usual_mode(directory: Path) -> int:
    """Return the mode that a new file gets here; safetensors makes its files for the owner alone."""
    probe = directory / f".{uuid.uuid4().hex}.tmp"
    probe.touch()
    try:
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
