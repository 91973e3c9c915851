"""A number for the bits of tensors, the same whichever order they are read in."""

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT_BITS = 52
"""Bits of a whole number that the step table's float64 holds exactly."""


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors' elements, taken as whole numbers: exact in any order, on any device (local)."""
    total: Tensor | None = None
    for number, tensor in enumerate(tensors, start=1):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = real.detach().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)
        total = bits if total is None else total + bits.to(total.device) * (2 * number + 1)
    assert total is not None
    return total & (1 << _EXACT_BITS) - 1
