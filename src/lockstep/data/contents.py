"""A number for the contents of a data set, which distinguishes two of one length.

Loading a sample may be slow, so tensors in torch's own containers are read where they are. Of another data set a few
samples are loaded, in a random state of their own. Where they differ between ranks, so do all others as a rule: files
in the order of `os.listdir`, a vocabulary that was built from a set.

[Note: equal contents] Hosts may differ in how they round: floating-point numbers enter as a sum and a sum of squares,
of which three digits count. The path of a file may differ from host to host, and does not enter.

[Note: state of what loads] The other number is for the state of what loads samples: does a loading process that stays
still have the present one? It is a hash of what pickling would write, so it covers what a data set, its transforms and
a collate function hold, at any depth. Nothing needs to be picklable, and of code outside of installed packages it also
covers what the walker (`held_objects.py`) finds there. It is asked for at each epoch, so it must be cheap. Of a large
array or tensor it covers address, shape, version (torch counts the changes in place of a tensor) and some elements; of
a long list of objects some of them. A long list or dictionary of numbers and texts, or of tuples, lists or dictionaries
of these, is covered as a whole. Generators do not count: they are seeded for each sample, see `keyed.py`.
"""

import hashlib
import mmap
import os
import pickle
import sys
import types
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.data.keyed import generator_kinds
from lockstep.held_objects import Walk
from lockstep.torch_private.modules import byte_view, version_of

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
_LONG = 1024
"""A container of more items is covered in one piece, or by some of its items."""
_WHOLE_BYTES = 8 << 20
"""A larger array is covered by some of its bytes."""
_ALL_BYTES = 64 << 20
"""And so is each array when so many bytes were read."""
_NUM_BYTES = 4096
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_CONTAINERS = (list, tuple, dict, set, frozenset)


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
        return " ".join(map(_describe_tensor, value.unbind() if value.is_nested else [value]))
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
    if tensor.layout is not torch.strided or tensor.is_quantized:
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


def state_number(root: object) -> int:
    """Return a number that is another one when the state is; where that cannot be told, another one at each call."""
    state = _State()
    try:
        _StateHash(state).dump(root)
    except Exception:  # noqa: BLE001 - pickling calls the user's code, which may raise anything
        return int.from_bytes(os.urandom(8), "little")
    return int.from_bytes(state.hash.digest(), "little")


@final
class _State:
    """What pickling writes into: only the hash is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self._left = _ALL_BYTES

    def write(self, data: Any) -> int:
        piece = memoryview(data)
        self.hash.update(piece)
        return piece.nbytes

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """Cover the contents of an array; what this returns tells the pickler not to write them."""
        self.write(self.some_of(buffer.raw()))

    def some_of(self, piece: memoryview) -> bytes | memoryview:
        if piece.nbytes <= min(_WHOLE_BYTES, self._left):
            self._left -= piece.nbytes
            return piece
        return bytes(piece.cast("B")[:: piece.nbytes // _NUM_BYTES or 1])


@final
class _StateHash(pickle.Pickler):
    def __init__(self, state: _State) -> None:
        super().__init__(state, protocol=5, buffer_callback=state.add_buffer)
        self._state = state
        self._walk = Walk(())
        self._described: dict[int, object] = {}  # holds them: another object must not get the address of one

    def persistent_id(self, value: Any) -> object:
        """Return what is written for a long container; called for each object."""
        if type(value) in _CONTAINERS and len(value) > _LONG:
            return type(value).__name__, len(value), _cover(value.items() if type(value) is dict else value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what is written for an object that is none of Python's own containers, numbers and texts."""
        if value is _stand_in:
            return NotImplemented
        if id(value) in self._described:
            return _stand_in, ("again", list(self._described).index(id(value)))
        if (described := self._describe(value)) is None:
            try:
                reduced = value.__reduce_ex__(5)
            except Exception:  # noqa: BLE001 - of the user's class, or what cannot be pickled: a lock, an open file
                described = id(value), getattr(value, "__dict__", None)
            else:
                return (_stand_in, (reduced,)) if isinstance(reduced, str) else reduced
        self._described[id(value)] = value
        return _stand_in, (type(value).__qualname__, described)

    def _describe(self, value: Any) -> tuple[object, ...] | None:
        """Return what the state of an object depends on, where it is not what pickling writes."""
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if _is_array(value):
            return self._describe_array(value)
        if isinstance(value, types.FunctionType | type):
            held = [(part.name, part.value) for part in self._walk.parts(value)]
            return value.__module__, id(getattr(value, "__code__", None)), held
        if isinstance(value, types.ModuleType):
            return (value.__name__,)
        return () if isinstance(value, generator_kinds()) else None

    def _describe_tensor(self, tensor: Tensor) -> tuple[object, ...]:
        kind = tensor.dtype, tuple(tensor.shape), str(tensor.device)
        version = None if tensor.is_inference() else version_of(tensor)
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            return str(kind), version, id(tensor)
        place = tensor.data_ptr(), tensor.stride(), tensor.__dict__
        if not tensor.is_contiguous():
            return str(kind), version, place
        raw = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
        return str(kind), version, place, bytes(self._state.some_of(raw.data))

    def _describe_array(self, array: Any) -> tuple[object, ...]:
        kind = str(array.dtype), array.shape, array.strides, array.__array_interface__["data"][0]
        if array.dtype.hasobject:
            return *kind, array.tolist()
        if _is_file(array):  # to read it is slow, and processes share what is written into it
            return kind
        if not array.flags.c_contiguous:
            array = array[tuple(evenly_spaced(length) for length in array.shape[:1])]
        return *kind, bytes(self._state.some_of(memoryview(array.tobytes() if array.ndim == 0 else array).cast("B")))


def _stand_in(*_: object) -> None:
    """Stand for what makes an object of its state: nobody makes one."""


def _cover(values: Collection[Any]) -> object:
    """Return a number for all of plain values, or some of other ones."""
    flat = values
    lengths: list[int] = []
    for _ in range(3):
        kinds = set(map(type, flat))
        if kinds <= _PLAIN:
            return hash(tuple(flat)), lengths
        if not kinds <= {tuple, list, dict}:
            break
        lengths.append(hash(tuple(map(len, flat))))
        flat = list(chain.from_iterable(each.items() if type(each) is dict else each for each in flat))
    items = list(values)
    return [items[index] for index in evenly_spaced(len(items))]


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_file(array: Any) -> bool:
    base = array
    while _is_array(base):
        base = base.base
    return isinstance(base, mmap.mmap)
