"""A tensor as the bytes that a file holds of it."""

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, row after row; its own memory if it lies contiguously on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
