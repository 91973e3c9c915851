"""One memory for many tensors, so that one message carries them, and one operation chooses between two copies."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16


@final
class FlatMemory:
    """Memory for tensors of any dtypes, kept from step to step: one flat tensor of bytes per device.

    `values` are views of it, one for each tensor that it was fitted to.
    """

    def __init__(self) -> None:
        self._specs: list[tuple[torch.device, torch.dtype, torch.Size]] = []
        self.flat_by_device: dict[torch.device, Tensor] = {}
        self.values: list[Tensor] = []

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Make room for tensors like these; return whether they are others than before."""
        specs = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
        if specs == self._specs:
            return False
        self._specs = specs
        offsets, totals = [], dict.fromkeys((device for device, _, _ in specs), 0)
        for tensor in tensors:
            offsets.append(totals[tensor.device])
            totals[tensor.device] += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # Bytes, so that one message or operation takes every dtype, also those that a backend cannot add up.
        self.flat_by_device = {
            device: torch.zeros(total, dtype=torch.uint8, device=device) for device, total in totals.items()
        }
        self.values = [
            self.flat_by_device[tensor.device][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(offsets, tensors, strict=True)
        ]
        return True
