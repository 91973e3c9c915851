"""Numbers for the bits of tensors, and sums that show whether all their numbers are finite.

[Note: one hash] Everything that compares tensors by a number takes `sum_of_bits`. It depends on each bit, on the place
of each element, and on dtypes and shapes; not on the device, on strides, or on the number of threads, because sums of
whole numbers that wrap are exact in any order:

    words    w[0], w[1], ...       the elements as whole numbers of 32 bits, those of 8 bytes as two
    blocks   s[j] = sum of w[k] * weight[k] over the words of block j          modulo 2**64
    number   sum of mix(s[j]) * weight[j] over all blocks, plus a number for the layout

Weights have 64 random bits and words have 32, so that the sign of a number, its highest bit, is still in the upper half
of the product. Read are the upper bits of the sum: its lower ones do not depend on the upper ones of the words.

[Note: sums for finite checks] A sum is finite only if all numbers are. One that is not finite does not prove that a
number is not, for sums of large numbers overflow. So the caller must then look at each number, and nothing depends on
what was summed with what. Where gradients are multiplied anyway, they are looked at on the way (`multiply`).
"""

import ctypes
import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.comm.shm import native
from lockstep.devices.transfer import is_asynchronous
from lockstep.torch_private.modules import flatten_dense, foreach_mul_

_IS_SPARSE = attrgetter("is_sparse")
_IS_CPU = attrgetter("is_cpu")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WORD_BYTES = 4
_BLOCK_WORDS = 1 << 15
_BLOCK_BYTES = _BLOCK_WORDS * _WORD_BYTES
_FEWEST_WEIGHTS = 1 << 10
_ROWS_ON_DEVICE = 128
"""So many blocks are one operation on a device."""
_KEPT_BITS = 52
"""Bits of a whole number that the step table's float64 holds exactly."""
_GLANCE_BYTES = 1 << 20
"""Up to so many bytes a glance sees all of a tensor."""
_GLANCE_ELEMENTS = 1 << 14
"""Of a larger tensor a glance sees about so many elements."""
_SMALL_ELEMENTS = 1 << 14
"""Tensors below are put together first: a call of its own would take longer than the copying."""
_MULTIPLIED = {torch.float32: 0, torch.float64: 1}
"""Kinds of numbers that `comm/shm/native/shm.c` multiplies and looks at meanwhile."""
Whole = TypeVar("Whole", int, Tensor)
_NUMBERS_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums of these are kept in, which would overflow soon."""


def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number for tensors in their order, without waiting for a device (local). [Note: one hash]."""
    number = _number(list(tensors), ())
    return torch.tensor(number, device="cpu") if isinstance(number, int) else number


def numbers_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return `sum_of_bits` of each tensor by itself; waits for a device (local)."""
    library, rows = _library(), [(each.data_ptr(), each.nbytes) for each in tensors if _is_row(each)]
    if library is None or len(rows) < len(tensors):
        return [int(sum_of_bits([each])) for each in tensors]
    sums = iter(_sum_rows(library, rows))
    numbers: list[int] = []
    for tensor in tensors:
        num_blocks = -(-tensor.nbytes // _BLOCK_BYTES)
        total = _number_layout(((tensor.dtype, tensor.shape),), ())
        for whole, weight in zip(islice(sums, num_blocks), _list_weights(_BLOCK_WORDS), strict=False):
            total += (whole ^ whole >> 32) * weight
        numbers.append(_upper_bits(total))
    return numbers


def glance_at_bits(*tensors: Tensor) -> int:
    """Return a number that sees all of small tensors and a part of large ones; waits for a device (local)."""
    # The whole shape counts, whatever is seen of it.
    return int(_number(list(map(glance, tensors)), tuple([each.shape for each in tensors])))


def _number(tensors: Sequence[Tensor], further: tuple[torch.Size, ...]) -> Tensor | int:
    """Return the number, as a tensor only where the device is not to be waited for."""
    if any(map(_IS_SPARSE, tensors)):
        tensors = [part for each in tensors for part in _strided_parts(each)]
    layout = _number_layout(tuple([(each.dtype, each.shape) for each in tensors]), further)
    small = [each for each in tensors if each.numel() < _SMALL_ELEMENTS]
    if not all(map(_IS_CPU, tensors)):
        return _number_on_device(tensors, small, layout)
    # In whole numbers of Python, which takes a few of these instead of operations on a few elements.
    sums = _sum_bytes(b"".join(map(_read_bytes, small))) if small else []
    if len(small) < len(tensors):
        with torch.no_grad():
            sums += [int(each) for large in _not_in(tensors, small) for each in _sum_blocks(_as_words(large))]
    total = layout
    for whole, weight in zip(sums, _list_weights(len(sums)), strict=True):
        total += (whole ^ whole >> 32) * weight
    return _upper_bits(total)


@torch.no_grad()
def _number_on_device(tensors: Sequence[Tensor], small: Sequence[Tensor], layout: int) -> Tensor | int:
    home = tensors[0].device
    flats = [_as_words(each) for each in _not_in(tensors, small)]
    if small:
        joined = flatten_dense([_as_bytes(each).to(home) for each in small])
        flats.insert(0, _as_words(nn.functional.pad(joined, (0, -len(joined) % _WORD_BYTES))))
    sums_of_blocks = [each.to(home) for flat in flats for each in _sum_blocks_with_torch(flat)]
    if not sums_of_blocks:  # all tensors are empty
        return _upper_bits(layout)
    blocks = torch.stack(sums_of_blocks)
    return _upper_bits(((blocks ^ blocks >> 32) * _make_weights(len(blocks), home)).sum() + layout)


def _not_in(tensors: Sequence[Tensor], small: Sequence[Tensor]) -> list[Tensor]:
    return [] if len(small) == len(tensors) else [each for each in tensors if each.numel() >= _SMALL_ELEMENTS]


def _upper_bits(number: Whole) -> Whole:
    """Return the upper ones of the lowest 64 bits, which are all that a tensor has."""
    return number >> 64 - _KEPT_BITS & (1 << _KEPT_BITS) - 1


@lru_cache(maxsize=1024)
def _number_layout(layout: object, further: object) -> int:
    digest = hashlib.blake2b(repr((layout, further)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _strided_parts(tensor: Tensor) -> Sequence[Tensor]:
    if not tensor.is_sparse:
        return (tensor,)
    whole = tensor.detach().coalesce()
    return whole.indices(), whole.values()


def _as_real(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.resolve_neg() if real.is_neg() else real


def _as_words(tensor: Tensor) -> Tensor:
    """Return a tensor as flat whole numbers; which ones depends on its dtype and length alone."""
    flat = _as_real(tensor).reshape(-1).contiguous()
    if flat.nbytes % _WORD_BYTES:
        return flat.view(_WORDS[flat.element_size()])
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int32)


def _as_bytes(tensor: Tensor) -> Tensor:
    return _as_real(tensor).reshape(-1).contiguous().view(torch.uint8)


def _read_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, as a rule without an operation of torch for each."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = _as_bytes(tensor.detach())
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _sum_bytes(read: bytes) -> list[int]:
    """Return what `_sum_blocks` does, of the bytes of small tensors."""
    words = np.frombuffer(read + b"\0" * (-len(read) % _WORD_BYTES), np.int32).astype(np.int64)
    weights = _weights_of_blocks(min(_BLOCK_WORDS, max(_FEWEST_WEIGHTS, 1 << len(words).bit_length())))
    starts = range(0, len(words), _BLOCK_WORDS)
    return [int(words[start : start + _BLOCK_WORDS].dot(weights[: len(words) - start])) for start in starts]


def _is_row(tensor: Tensor) -> bool:
    """Whether the library can read a tensor where it is, as `_number` would."""
    is_plain = tensor.is_cpu and not tensor.is_sparse and tensor.is_contiguous()
    is_alike = is_plain and not (tensor.is_neg() or tensor.is_conj())
    has_words = is_alike and (tensor.numel() < _SMALL_ELEMENTS or tensor.nbytes % _WORD_BYTES == 0)
    return has_words and tensor.nbytes <= _BLOCK_WORDS * _BLOCK_BYTES


def _sum_rows(library: ctypes.CDLL, rows: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Return the sums of the blocks of rows, each an address and a number of bytes."""
    numbers = array("q", chain.from_iterable(rows))
    sums = array("q", bytes(8 * sum(-(-num_bytes // _BLOCK_BYTES) for _, num_bytes in rows)))
    weights = _weights_of_cpu(_BLOCK_WORDS).data_ptr()
    library.lockstep_sum_blocks(numbers.buffer_info()[0], len(rows), weights, sums.buffer_info()[0])
    return sums


def _sum_blocks(words: Tensor) -> Iterable[Tensor | int]:
    library = _library()
    if library is not None and words.is_cpu and words.dtype == torch.int32:
        return _sum_rows(library, [(words.data_ptr(), words.nbytes)])
    return _sum_blocks_with_torch(words)


def _sum_blocks_with_torch(words: Tensor) -> list[Tensor]:
    weights = _weights(_BLOCK_WORDS, words.device)
    num_full = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    sums: list[Tensor] = []
    if num_full:
        rows = words[:num_full].view(-1, _BLOCK_WORDS)
        if words.is_cpu:  # one block at once, which stays in the cache
            block = torch.empty(_BLOCK_WORDS, dtype=torch.int64, device="cpu")
            sums += [block.copy_(row).dot(weights) for row in rows]
        else:
            at_once = min(len(rows), _ROWS_ON_DEVICE)
            room = torch.empty(at_once, _BLOCK_WORDS, dtype=torch.int64, device=words.device)
            for some in rows.split(at_once):
                sums += room[: len(some)].copy_(some).mul_(weights).sum(1).unbind()
    if num_full < words.numel():
        rest = words[num_full:]
        sums.append((rest * weights[: rest.numel()]).sum())
    return sums


def _weights(number: int, device: torch.device) -> Tensor:
    """Return the first weights; not kept on a device, for another stream would use them before they are there."""
    return _weights_of_cpu(number) if device.type == "cpu" else _make_weights(number, device)


@cache
def _list_weights(at_least: int) -> Sequence[int]:
    return tuple(_make_weights(at_least, torch.device("cpu")).tolist())


@cache
def _weights_of_cpu(number: int) -> Tensor:
    return _make_weights(number, torch.device("cpu"))


@cache
def _weights_of_blocks(number: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return _weights_of_cpu(number).numpy()


def _make_weights(number: int, device: torch.device) -> Tensor:
    """Return the first outputs of SplitMix64 (Steele et al., OOPSLA 2014)."""
    found = torch.arange(1, number + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return found ^ (found >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def glance(tensor: Tensor) -> Tensor:
    """Return all of a small tensor, and about so many elements of a large one (local)."""
    if tensor.is_sparse or tensor.nbytes <= _GLANCE_BYTES:
        return tensor
    # An odd step, so that it does not fall on one column of a matrix again and again.
    return tensor.detach().reshape(-1)[:: tensor.numel() // _GLANCE_ELEMENTS | 1]


def multiply(source: Tensor, scale: float, out: Tensor) -> bool:
    """Write `source * scale` to `out`, dense and on the CPU; return whether all of it is finite (local)."""
    is_alike = type(source) is Tensor and not source.is_neg()
    if is_alike and (source.dtype, source.shape, source.stride()) == (out.dtype, out.shape, out.stride()):
        address = source.data_ptr()  # none: zeros that are nowhere
        found = _multiply_rows((out.data_ptr(), address, out.numel()), scale, out.dtype) if address else None
        if found is not None:
            return found
    with torch.no_grad():
        torch.mul(source, scale, out=out)
    return is_finite(out)


def multiply_in_place(tensors: list[Tensor], scale: float) -> bool:
    """Multiply dense tensors of one dtype on the CPU; return whether all they hold is finite (local).

    False proves nothing: [Note: sums for finite checks].
    """
    addresses = list(map(Tensor.data_ptr, tensors))
    rows = chain.from_iterable(zip(addresses, addresses, map(Tensor.numel, tensors), strict=True))
    found = _multiply_rows(rows, scale, tensors[0].dtype)
    if found is None:
        foreach_mul_(tensors, scale)
        found = math.isfinite(sum_for_finite_check(tensors, tensors[0].device))
    return found


def _multiply_rows(rows: Iterable[int], scale: float, dtype: torch.dtype) -> bool | None:
    """Do it with the library; None where that cannot, or torch would divide the work among threads."""
    library, kind, numbers = _library(), _MULTIPLIED.get(dtype), array("q", rows)
    if library is None or kind is None or (torch.get_num_threads() > 1 and max(numbers[2::3]) > _SMALL_ELEMENTS):
        return None
    return bool(library.lockstep_multiply(numbers.buffer_info()[0], len(numbers) // 3, scale, kind))


@cache
def _library() -> ctypes.CDLL | None:
    return None if native.why_not() else native.load()


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return math.isfinite(float(_sum(_as_real(values)))) or bool(values.isfinite().all())


@torch.no_grad()
def sum_for_finite_check(tensors: Iterable[Tensor], device: torch.device) -> Tensor | float:
    """Return a number that is not finite if any in the tensors is not (local); it stays on an asynchronous device."""
    sums: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        real = _as_real(tensor)
        if real.numel() < _SMALL_ELEMENTS:
            small.setdefault((real.dtype, real.device), []).append(real)
        else:
            sums.append(_sum(real))
    sums += [_sum(flatten_dense(alike)) for alike in small.values()]
    if is_asynchronous(device):
        return torch.stack([each.to(device, torch.float64) for each in sums]).sum() if sums else 0.0
    return sum(map(float, sums))


@torch.no_grad()
def largest_magnitude(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude, exactly, so it is finite if all are, on a device that is not waited for (local)."""
    real = list(map(_as_real, tensors))
    full = [tensor for tensor in real if tensor.numel()]
    return nn.utils.get_total_norm(full, math.inf).to(device) if full else torch.zeros((), device=device)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=_NUMBERS_SUMMED_AS.get(tensor.dtype))
