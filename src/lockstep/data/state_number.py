"""A number for the state of what loads samples: does a loading process that stays still have the present state?

It is a hash of what pickling would write, so it covers what a data set, its transforms and a collate function hold, at
any depth: attributes, slots, containers, what a function closes over. Of code outside of installed packages it also
covers the attributes of classes, and the global names that functions mention. Nothing needs to be picklable.

It is asked for at each epoch, so it must be cheap. Of a large array or tensor it covers address, shape, version (torch
counts the changes in place of a tensor) and some elements; of a long list of objects some of them. A long list or
dictionary of numbers and texts, or of tuples, lists or dictionaries of these, is covered as a whole.

Generators of random numbers do not count: they are seeded for each sample, see `keyed.py`.
"""

import hashlib
import mmap
import os
import pickle
import sys
import types
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor

from lockstep.data.contents import evenly_spaced
from lockstep.data.generators import generator_kinds
from lockstep.held_objects import contents_of, global_names
from lockstep.processes.user_line import LIBRARIES
from lockstep.torch_private.modules import version_of

_LONG = 1024
"""A container of more items is covered in one piece, or by some of its items."""
_WHOLE_BYTES = 8 << 20
"""A larger array is covered by some of its bytes."""
_ALL_BYTES = 64 << 20
"""And so is each array when so many bytes were read."""
_NUM_BYTES = 4096
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_CONTAINERS = (list, tuple, dict, set, frozenset)


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
    """Writes what nobody reads."""

    def __init__(self, state: _State) -> None:
        super().__init__(state, protocol=5, buffer_callback=state.add_buffer)
        self._state = state
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
        if isinstance(value, types.FunctionType):
            return tuple(_parts_of_function(value))
        if isinstance(value, type):
            return tuple(_parts_of_class(value))
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
    """Return whether an array is in a file that is mapped into memory."""
    base = array
    while _is_array(base):
        base = base.base
    return isinstance(base, mmap.mmap)


def _parts_of_function(function: types.FunctionType) -> Iterator[object]:
    yield function.__module__, function.__qualname__, id(function.__code__)
    if _is_library(function.__code__.co_filename):
        return
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    yield from map(contents_of, function.__closure__ or ())
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _parts_of_class(kind: type) -> Iterator[object]:
    yield kind.__module__, kind.__qualname__
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "builtins" or _is_library(str(getattr(module, "__file__", ""))):
        return
    yield kind.__bases__
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") or isinstance(value, types.FunctionType):
            yield name, getattr(value, "__func__", getattr(value, "fget", value))


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES)
