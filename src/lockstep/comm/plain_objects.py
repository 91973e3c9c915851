"""Objects as bytes that can be read from anybody: pickles in which only data is accepted.

A pickle names functions, and reading it calls them, so one from a stranger runs what the stranger likes. Reading here
accepts classes that hold data: Python's and NumPy's values, torch's types and tensors, our dataclasses, configs,
enums and exceptions. All else is refused before it is called.
"""

import builtins
import dataclasses
import datetime
import io
import pickle
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import PosixPath
from types import FunctionType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lockstep.errors import PeerFailedError, describe_exception

_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "range", "set", "slice"})
_CLASSES = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(OrderedDict, PosixPath, torch.Size, torch.device),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    )
}
_NUMPY = frozenset(
    {
        *(("numpy", "dtype"), ("numpy", "ndarray")),
        *(("numpy._core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct")),
        *(("numpy.core.multiarray", "scalar"), ("numpy.core.multiarray", "_reconstruct")),
    }
)


class RefusedObjectError(ValueError):
    """A message holds an object that is more than data."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The message names {name}, which is not plain data.")
        self.name = name


def pack_plain(value: Any) -> bytes:
    """Return an object as bytes for `unpack_plain`; RefusedObjectError if something in it is not plain data."""
    stream = io.BytesIO()
    try:
        _PlainPickler(stream, protocol=4).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a local function, a lock, ...
        raise RefusedObjectError(type(value).__qualname__) from error
    packed = stream.getvalue()
    unpack_plain(packed)
    return packed


def to_plain_error(error: Exception, rank: int) -> Exception:
    """Return an exception as other ranks can read it: itself, or one that has its class and message as text."""
    try:
        pack_plain(error)
    except RefusedObjectError:
        return PeerFailedError(f"Rank {rank} has failed: {describe_exception(error)} (LS213)")
    return error


def unpack_plain(packed: bytes) -> Any:
    """Return the object that `pack_plain` was given; ValueError if it names anything else, which is not called."""
    try:
        return _PlainUnpickler(io.BytesIO(packed)).load()
    except RefusedObjectError:
        raise
    except Exception as error:  # bytes of a stranger may raise anything
        raise ValueError(f"It cannot be read: {type(error).__name__}: {error}") from error


def tensor_from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor on the CPU from the bytes of its values."""
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    )


@final
class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return NotImplemented
        flat = value.detach().cpu().contiguous()
        return tensor_from_bytes, (flat.reshape(-1).view(torch.uint8).numpy().tobytes(), flat.dtype, tuple(flat.shape))


@final
class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - the C class has no `load_build` to override
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def load_build(self) -> None:
        """Refuse to set attributes of classes, functions and enum members, which the whole process shares."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type | FunctionType | Enum):
            raise RefusedObjectError(f"attributes of {getattr(target, '__qualname__', target)}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        found = _find(module, name)
        if found is None:
            raise RefusedObjectError(f"{module}.{name}")
        return found


def _find(module: str, name: str) -> Any:
    """Return a class or function that can only make data; None for any other."""
    if (module, name) == (__name__, tensor_from_bytes.__name__):
        return tensor_from_bytes
    if (module, name) in _NUMPY:
        return getattr(sys.modules.get(module), name, None)
    if (module, name) in _CLASSES:
        return _CLASSES[module, name]
    if module == "torch":
        found = getattr(torch, name, None) if "." not in name else None
        return found if isinstance(found, torch.dtype) else None
    if module == "builtins":
        found = getattr(builtins, name, None)
        is_error = isinstance(found, type) and issubclass(found, Exception)
        return found if name in _BUILTINS or is_error else None
    if module.startswith("lockstep."):
        found = getattr(sys.modules.get(module), name, None)
        if not isinstance(found, type) or found.__module__ != module:
            return None
        is_record = dataclasses.is_dataclass(found) or "__pydantic_fields__" in vars(found)
        return found if is_record or issubclass(found, Enum | Exception) else None
    return None
