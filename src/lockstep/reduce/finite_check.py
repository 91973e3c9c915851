"""Whether gradients are finite, by their sum, which only reads them: it is finite only if all of them are.

A sum that is not finite does not prove that a gradient is not, for sums of large numbers overflow. So the caller must
then check each gradient, and nothing depends on what was summed with what.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import flatten_dense

_SMALL_ELEMENTS = 1 << 14
"""Tensors below are put together first: a call of its own would take longer than the copying."""
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums of these are kept in, which would overflow soon."""


@torch.no_grad()
def sum_for_finite_check(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a float64 scalar on `device` that is not finite if any number in the tensors is not (local)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.numel() < _SMALL_ELEMENTS:
            small.setdefault((real.dtype, real.device), []).append(real)
        else:
            total += _sum(real).to(device)
    for alike in small.values():
        total += _sum(flatten_dense(alike)).to(device)
    return total


@torch.no_grad()
def largest_magnitude(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude of the numbers in the tensors, on `device`: exactly, so it is finite if all are.

    For a device that must not be waited for: nobody can look at each gradient there (local).
    """
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    full = [tensor for tensor in real if tensor.numel()]
    return nn.utils.get_total_norm(full, math.inf).to(device) if full else torch.zeros((), device=device)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=_SUMMED_AS.get(tensor.dtype))
