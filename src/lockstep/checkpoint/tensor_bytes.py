"""The bytes of a tensor, as a file stores them."""

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, without a copy if the tensor is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
