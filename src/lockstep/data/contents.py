"""A number for the contents of a data set, which distinguishes two of one length.

Loading a sample may be slow, so tensors in torch's own containers are read where they are. Of another data set a few
samples are loaded, in a random state of their own. Where they differ between ranks, so do all others as a rule: files
in the order of `os.listdir`, a vocabulary that was built from a set.

[Note: equal contents] Hosts may differ in how they round: floating-point numbers enter as a sum and a sum of squares,
of which three digits count. The path of a file may differ from host to host, and does not enter.
"""

import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.torch_private.modules import byte_view

OTHER_DATA = (
    "Samples that every rank has loaded by itself, with the same random states, differ. Look for what differs between "
    "the processes: files in the order of os.listdir (sort them), a vocabulary built from a set (sort it, or set "
    "PYTHONHASHSEED), a path, a random generator that the data set seeds by itself, a stream that gives each rank or "
    "each reading other records."
)
_NUM_READ = 64
"""Samples that are read, evenly spaced."""
_NUM_PARTS = 10_000
"""The most parts of a slice that are read."""
_MAX_DEPTH = 8
_MAX_STACKED = 4096
"""Elements of a tensor that is read together with others."""
_BYTES = (bytes, bytearray)
_NUMBERS = (bool, int, complex, type(None))
_CODE = (type, types.ModuleType, types.FunctionType)


def content_number(dataset: Dataset[object]) -> int:
    """Return a number that is the same for the same data; 0 if they are not tensors of torch's containers (local)."""
    if isinstance(dataset, TensorDataset) and all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return zlib.crc32(b"".join(map(_some_bytes, dataset.tensors)))
    if isinstance(dataset, Subset):
        indices = evenly_spaced(len(dataset.indices))
        return _combine([content_number(dataset.dataset)], [int(dataset.indices[index]) for index in indices])
    if isinstance(dataset, ConcatDataset):
        return _combine([content_number(part) for part in dataset.datasets])
    return 0


def slice_number(data: object) -> int:
    """Return a number that is the same for slices of the same samples; never 0 (local). [Note: equal contents]."""
    return zlib.crc32("\n".join(islice(_parts(data, _MAX_DEPTH), _NUM_PARTS)).encode()) or 1


def records_number(count: int, records: Sequence[Any]) -> int:
    """Return `slice_number([count, *records])`, sooner where the records are alike."""
    parts = chain([f"{1 + len(records)} of them", repr(count)], *_parts_of_each(records, _MAX_DEPTH - 1))
    return zlib.crc32("\n".join(islice(parts, _NUM_PARTS)).encode()) or 1


def _parts_of_each(values: Sequence[Any], depth: int) -> list[list[str]]:
    """Return what `_parts` yields for each of some values; all small tensors of one shape are read together."""
    first, kinds = values[0], set(map(type, values))
    if kinds == {int}:
        return [[repr(each)] for each in values]
    if kinds <= {int, float, str, bytes}:
        return [[str(_describe(each))] for each in values]
    if len(kinds) == 1 and depth > 0:
        if type(first) is Tensor and _can_be_stacked(values):
            return [[text] for text in _describe_tensors(torch.stack(list(values)))]
        if type(first) in {tuple, list} and first and len(set(map(len, values))) == 1:
            columns = [_parts_of_each(column, depth - 1) for column in zip(*values, strict=True)]
            return [[f"{len(first)} of them", *chain(*row)] for row in zip(*columns, strict=True)]
        if type(first) is dict and first and all(each.keys() == first.keys() for each in values):
            names = sorted(first, key=str)
            columns = [_parts_of_each([each[name] for each in values], depth - 1) for name in names]
            named = [[[str(name), *parts] for parts in column] for name, column in zip(names, columns, strict=True)]
            return [list(chain(*row)) for row in zip(*named, strict=True)]
    return [list(_parts(value, depth)) for value in values]


def _can_be_stacked(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    is_small = first.is_floating_point() and 0 < first.numel() <= _MAX_STACKED and first.device.type == "cpu"
    kinds = {(each.layout, each.is_nested, each.is_quantized, each.dtype, each.shape) for each in tensors}
    return is_small and kinds == {(torch.strided, False, False, first.dtype, first.shape)}


@torch.no_grad()
def _describe_tensors(stacked: Tensor) -> list[str]:
    """Return what `_describe_tensor` does for each of stacked tensors."""
    kind = f"{stacked.dtype} {tuple(stacked.shape[1:])}"
    rows = stacked.reshape(len(stacked), -1).double()
    sums = zip(rows.clamp(min=0).sum(1).tolist(), rows.square().sum(1).tolist(), strict=True)
    return [f"{kind} {positive:.3g} {squares:.3g}" for positive, squares in sums]


def _parts(value: Any, depth: int) -> Iterator[str]:
    """Describe each number, text and tensor in a value, in an order that does not depend on the process."""
    if (text := _describe(value)) is not None or depth == 0:
        yield text or type(value).__name__
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name)
            yield from _parts(value[name], depth - 1)
    elif isinstance(value, Sequence):
        yield f"{len(value)} of them"
        for part in value:
            yield from _parts(part, depth - 1)
    else:
        yield type(value).__name__
        yield from _parts(getattr(value, "__dict__", {}), depth - 1)


def _describe(value: Any) -> str | None:
    """Return a number, a text or a tensor in words, the same for equal ones; None for what has parts."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        is_numeric = value.dtype.kind in "biufc" and value.dtype.isnative
        return _describe_tensor(torch.tensor(value)) if is_numeric else f"{value.dtype} {value.shape}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, str):
        return "a path" if value.startswith("/") else repr(value)
    if isinstance(value, _BYTES):
        return f"{len(value)} bytes {zlib.crc32(value)}"
    if isinstance(value, _NUMBERS):
        return repr(value)
    return type(value).__name__ if isinstance(value, _CODE) else None


@torch.no_grad()
def _describe_tensor(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return kind
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return f"{kind} {zlib.crc32(byte_view(tensor).numpy().tobytes())}"
    values = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
    # Both sums are of positive numbers, so that rounding is small beside them.
    return f"{kind} {values.clamp(min=0).sum().item():.3g} {values.square().sum().item():.3g}"


def _combine(numbers: Sequence[int], indices: Sequence[int] = ()) -> int:
    return zlib.crc32(repr((numbers, indices)).encode()) if all(numbers) else 0


def _some_bytes(tensor: Tensor) -> bytes:
    values: bytes = byte_view(tensor.detach()[evenly_spaced(len(tensor))]).numpy().tobytes()
    return values


def evenly_spaced(length: int) -> list[int]:
    places = {number * (length - 1) // _NUM_READ for number in range(_NUM_READ + 1)}
    return sorted(places) if length else []
