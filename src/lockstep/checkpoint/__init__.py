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
"""
