"""A model's state as 64 hexadecimal digits."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.checkpoint.pace import Rest, no_rest
from lockstep.checkpoint.tensor_bytes import raw_bytes

Part = tuple[str, torch.dtype, Sequence[int], bytes | memoryview]
"""A tensor's name, dtype, shape and bytes."""


_CHUNK_BYTES = 1 << 22


def state_digest(tensors: Mapping[str, Tensor], rest: Rest = no_rest) -> str:
    """Return the SHA-256 of named tensors: names, dtypes, shapes and bytes, in the order of the names.

    Equal digests mean equal bits; -0.0 and 0.0 differ, and so do different NaNs. Tensors may lie on any device.

    Args:
        tensors: By name.
        rest: Called after every few megabytes.
    """
    parts = ((name, tensors[name].dtype, tensors[name].shape, raw_bytes(tensors[name])) for name in sorted(tensors))
    return digest_parts(parts, rest)


def digest_parts(parts: Iterable[Part], rest: Rest = no_rest) -> str:
    """Return what `state_digest` does, of tensors that are read one after the other, in the order of their names."""
    digest = hashlib.sha256()
    for name, dtype, shape, data in parts:
        digest.update(f"{name}|{dtype}|{list(shape)}|".encode())
        for begin in range(0, len(data), _CHUNK_BYTES):
            digest.update(data[begin : begin + _CHUNK_BYTES])
            rest()
    return digest.hexdigest()
