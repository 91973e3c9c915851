"""Checkpoints: a run's state as one file that other tools can read.

A checkpoint is a safetensors file. Parameters and buffers have the names of the model's `state_dict()`. The names of
all other tensors begin with `optimizer/`. Everything else is the *manifest*: JSON text in the file's header.

Files of other programs are read by `interop/`.

A checkpoint is *intact* if every byte is as it was written.

Invariants:
- A file under its final name is complete. A save that fails does not change earlier checkpoints.
- A checksum covers every byte of a file. Loading compares the checksums of all that it reads.
- Reading a file never runs code from it.
- The digest in the manifest is the digest of the parameters and buffers in the file.

docs/checkpoint-format.md describes the format.

The names below are imported when they are first used: finding checkpoints by their names needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.file import (
        load_checkpoint,
        read_manifest,
        read_verified_manifest,
        save_checkpoint,
        state_digest,
    )
    from lockstep.checkpoint.inspection import (
        CheckpointContents,
        VerificationResult,
        show_checkpoint,
        verify_checkpoint,
    )
    from lockstep.checkpoint.interop.fit import LoadedWeights
    from lockstep.checkpoint.interop.weights import load_weights
    from lockstep.checkpoint.manifest import Checkpoint, Manifest
    from lockstep.checkpoint.saver import OnError, Saver

__all__ = [
    "Checkpoint",
    "CheckpointContents",
    "LoadedWeights",
    "Manifest",
    "OnError",
    "Saver",
    "VerificationResult",
    "load_checkpoint",
    "load_weights",
    "read_manifest",
    "read_verified_manifest",
    "save_checkpoint",
    "show_checkpoint",
    "state_digest",
    "verify_checkpoint",
]

_MODULES = {
    "Checkpoint": "lockstep.checkpoint.manifest",
    "CheckpointContents": "lockstep.checkpoint.inspection",
    "LoadedWeights": "lockstep.checkpoint.interop.fit",
    "Manifest": "lockstep.checkpoint.manifest",
    "OnError": "lockstep.checkpoint.saver",
    "Saver": "lockstep.checkpoint.saver",
    "VerificationResult": "lockstep.checkpoint.inspection",
    "load_checkpoint": "lockstep.checkpoint.file",
    "load_weights": "lockstep.checkpoint.interop.weights",
    "read_manifest": "lockstep.checkpoint.file",
    "read_verified_manifest": "lockstep.checkpoint.file",
    "save_checkpoint": "lockstep.checkpoint.file",
    "show_checkpoint": "lockstep.checkpoint.inspection",
    "state_digest": "lockstep.checkpoint.file",
    "verify_checkpoint": "lockstep.checkpoint.inspection",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
