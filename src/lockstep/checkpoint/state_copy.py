"""A copy of a state in memory of the host, made into the same memory each time."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor


@final
class StateCopy:
    """Memory for one copy of a state.

    Tensors of a GPU are copied into pinned memory, all at once, which is several times faster than into any other.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, bool], Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, and return the copies; they hold until the next call.

        Raises:
            RuntimeError: There is no memory for them.
        """
        previous, self._buffers = self._buffers, {}  # what is not needed any more is freed
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key = name, tensor.is_cuda  # and with it whether the memory is pinned, which is slow to ask
            buffer = previous.pop(key, None)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = self._buffers[key] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies
