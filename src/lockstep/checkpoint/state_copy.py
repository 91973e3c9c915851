"""A copy of a state in CPU memory, which is reused from copy to copy."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from lockstep.devices.transfer import is_asynchronous


@final
class StateCopy:
    """Memory for one copy of a state.

    GPU tensors are copied to pinned memory without blocking, which is several times faster than to pageable memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, bool], Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors and return the copies, which are valid until the next call; RuntimeError without memory."""
        previous, self._buffers = self._buffers, {}  # memory that is not reused below is freed
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            is_pinned = is_asynchronous(tensor.device)  # the buffer's; is_pinned() would be slow
            key = name, is_pinned
            buffer = previous.pop(key, None)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
            copies[name] = self._buffers[key] = buffer.copy_(tensor.detach(), non_blocking=is_pinned)
        for device in {tensor.device for tensor in tensors.values() if is_asynchronous(tensor.device)}:
            torch.accelerator.synchronize(device)
        return copies
