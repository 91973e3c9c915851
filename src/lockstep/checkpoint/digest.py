"""The digest of a model: SHA-256 of its parameters and buffers, as 64 hexadecimal digits."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.checkpoint.tensor_bytes import raw_bytes
from lockstep.checkpoint.throttle import Pause, no_pause

Part = tuple[str, torch.dtype, Sequence[int], bytes | memoryview]
"""A tensor's name, dtype, shape and bytes."""

_CHUNK_BYTES = 1 << 22


def state_digest(tensors: Mapping[str, Tensor], pause: Pause = no_pause) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of tensors, sorted by name.

    Equal digests mean equal bits: -0.0 and 0.0 give different digests, and so do NaNs with different bits.
    """
    parts = ((name, tensors[name].dtype, tensors[name].shape, raw_bytes(tensors[name])) for name in sorted(tensors))
    return digest_parts(parts, pause)


def digest_parts(parts: Iterable[Part], pause: Pause = no_pause) -> str:
    """Return the digest that `state_digest` returns, from tensors that come one at a time, sorted by name."""
    digest = hashlib.sha256()
    for name, dtype, shape, data in parts:
        digest.update(f"{name}|{dtype}|{list(shape)}|".encode())
        for begin in range(0, len(data), _CHUNK_BYTES):
            digest.update(data[begin : begin + _CHUNK_BYTES])
            pause()
    return digest.hexdigest()
