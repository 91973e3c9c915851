"""Numbers for the bits of tensors, of all or of so few that it costs next to nothing, and checks for finite ones.

A sum only reads gradients, and is finite only if all of them are. One that is not finite does not prove that a gradient
is not, for sums of large numbers overflow. So the caller must then check each gradient, and nothing depends on what was
summed with what.
"""

import ctypes
import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import flatten_dense

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS_SUMMED_AS = {**_INTEGERS, 8: torch.int32}
"""As what elements are summed. A sum of 64-bit numbers would lose their highest bits: sign and exponent."""
_EXACT_BITS = 52
"""Bits of a whole number that the step table's float64 holds exactly."""
_GLANCE_BYTES = 1 << 20
"""Up to so many bytes a glance sees all of a tensor."""
_GLANCE_ELEMENTS = 1 << 14
"""Of a larger tensor a glance sees about so many elements."""
_COPIED_BYTES = 1 << 15
"""Tensors up to this size are read without an operation of torch, which takes longer the first time in a step."""
_SMALL_ELEMENTS = 1 << 14
"""Tensors below are put together first: a call of its own would take longer than the copying."""
_NUMBERS_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums of these are kept in, which would overflow soon."""


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors' elements, taken as whole numbers: exact in any order, on any device (local)."""
    total: Tensor | None = None
    for number, tensor in enumerate(tensors, start=1):
        real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach()
        words = real.reshape(-1) if real.element_size() == 8 else real  # noqa: PLR2004 - bytes of float64
        bits = words.view(_BITS_SUMMED_AS[real.element_size()]).sum(dtype=torch.int64)
        total = bits if total is None else total + bits.to(total.device) * (2 * number + 1)
    assert total is not None
    return total & (1 << _EXACT_BITS) - 1


@torch.no_grad()
def glance_at_bits(tensor: Tensor) -> int:
    """Return a number for the bits of a tensor, which sees all of a small one and a part of a large one (local).

    On an asynchronous device this waits for it. Equal tensors have equal numbers where they are laid out alike.
    """
    seen = _glance(tensor.detach())
    if seen.is_contiguous() and seen.nbytes % 8 == 0 and seen.storage_offset() * seen.element_size() % 8 == 0:
        return int(seen.reshape(-1).view(torch.int64).sum())  # wraps, so it is exact, and far faster than to widen
    real = torch.view_as_real(seen) if seen.is_complex() else seen
    return int(real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64))


def glance_at_memory(tensor: Tensor) -> int:
    """Return a number for the bits of a tensor with storage of its own, as `glance_at_bits` does (local).

    Of a small one on the CPU the bytes are read where they lie: for what is looked at in each step.
    """
    is_plain = tensor.nbytes <= _COPIED_BYTES and tensor.is_cpu and tensor.layout is torch.strided
    address = tensor.data_ptr() if is_plain and tensor.is_contiguous() else 0
    if not address:  # also of memory that was given back
        return glance_at_bits(tensor)
    return zlib.crc32(ctypes.string_at(address, tensor.nbytes))


def glance_is_finite(tensor: Tensor) -> bool:
    """Return whether the sum of a tensor that needs no gradient, or of a part of a large one, is finite (local).

    On an asynchronous device this waits for it. A sum may overflow where each number is finite.
    """
    seen = _glance(tensor)
    real = torch.view_as_real(seen) if seen.is_complex() else seen
    total = float(real.sum() if real.element_size() >= 4 else real.sum(dtype=torch.float32))  # noqa: PLR2004 - half
    return total - total == 0.0


def _glance(tensor: Tensor) -> Tensor:
    if tensor.nbytes <= _GLANCE_BYTES:
        return tensor
    # An odd step, so that it does not fall on one column of a matrix again and again.
    return tensor.reshape(-1)[:: tensor.numel() // _GLANCE_ELEMENTS | 1]


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
    return tensor.sum(dtype=_NUMBERS_SUMMED_AS.get(tensor.dtype))
