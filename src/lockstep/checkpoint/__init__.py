"""Checkpoints: a run's state as one file that other tools can read.

A checkpoint is a safetensors file. Parameters and buffers lie in it under the model's plain names; the optimizer's
tensors under `optimizer/`; everything else is the *manifest*, JSON in the file's header.

Weights that others wrote are recognised by what is in a file (`foreign.py`), and what wrappers put into their names is
found by structure (`names.py`).

Invariants: a file under its final name is whole; a failed save leaves the files before it as they were; every byte of a
file is covered by a checksum, and none is believed before it was compared; nothing that is read can run code; the
digest in the manifest is that of the parameters and buffers in the file. docs/checkpoint-format.md has the format.
"""

from lockstep.checkpoint.digest import state_digest
from lockstep.checkpoint.file import load_checkpoint, read_manifest, read_verified_manifest, save_checkpoint
from lockstep.checkpoint.inspection import CheckpointContents, VerificationResult, show_checkpoint, verify_checkpoint
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
