"""A model's state as 64 hexadecimal digits."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, dtypes, shapes and bytes, in the order of the names.

    Equal digests mean equal bits; -0.0 and 0.0 differ, and so do different NaNs. Tensors may lie on any device.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
