"""Pickling for messages between the launcher and its workers: cloudpickle, and objects that it does not support.

cloudpickle sends functions and classes of a script or a notebook cell by value, with the global variables that they
use. These variables often refer to objects of imported modules that cannot be pickled, or only as copies. Such objects
are sent by reference, as the names of module and attribute, like imported functions:

    modules whose class is a subclass of ModuleType                torch.backends.cudnn, torch._dynamo.config
    modules that cannot be imported under their own name           torch.ops.aten
    operators                                                      torch.ops.aten.add, torch.ops.aten.add.Tensor
    classes that have another name in their module                 torch.nn.attention.SDPBackend
    torch's default generators                                     torch.default_generator

A function is sent with the global names that it uses, and those that the body of a class in it uses.
Code keeps the name of its file, by which a worker's traceback finds the lines of source. (cloudpickle 3.1.3 drops it.)
"""

import functools
import importlib
import io
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol, final

import cloudpickle

from lockstep.held_objects import global_names

_MAIN = frozenset({"__main__", "__mp_main__"})
"""Modules that are the started script. In a worker they are another script."""
_CACHED_FUNCTION = type(functools.cache(len))
_NO_FILE = "<sent separately>"
"""The file of code whose true one is beside it in the pickle."""


class Writable(Protocol):
    def write(self, data: bytes, /) -> object:
        """Write the next bytes."""


def pack(value: object) -> bytes:
    stream = io.BytesIO()
    pack_into(stream, value)
    return stream.getvalue()


def pack_into(stream: Writable, value: object) -> None:
    _Pickler(stream).dump(value)


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced: Any = _reduce(obj)
        if reduced is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):  # one that is sent by value
            # cloudpickle 3.1.3 sends the global names of functions, and not those of the classes that they define.
            _, variables = reduced[2]
            sent, there = variables["__globals__"], obj.__globals__
            sent.update((name, there[name]) for name in global_names(obj.__code__) if name in there)
        return reduced


def _reduce(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return a function and its arguments that make `obj` in the other process; None to leave it to cloudpickle."""
    if isinstance(obj, ModuleType):
        is_ordinary = type(obj) is ModuleType and sys.modules.get(obj.__name__) is obj
        return None if is_ordinary else _refer_to(obj)
    if isinstance(obj, type):
        return None if _is_found_by_name(obj) else _refer_to(obj)
    if (torch := sys.modules.get("torch")) is not None:  # without it nothing of torch can be in the value
        if isinstance(obj, (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))):
            return _resolve, ("torch.ops", str(obj))
        if obj is torch.default_generator:
            return _resolve, ("torch", "default_generator")
    if isinstance(obj, CodeType) and obj.co_filename != _NO_FILE:
        return _make_code, (obj.replace(co_filename=_NO_FILE), obj.co_filename)
    if isinstance(obj, functools.cached_property):  # it holds a lock before Python 3.12
        return _make_cached_property, (obj.func, obj.attrname)
    # pickle sends only its name, which the worker does not find.
    if isinstance(obj, _CACHED_FUNCTION) and (obj.__module__ in _MAIN or "<locals>" in obj.__qualname__):
        return _make_lru_cache, (obj.__wrapped__, obj.cache_parameters())
    return None


def _is_found_by_name(cls: type) -> bool:
    """Whether a class is an attribute of its module under its name, or cloudpickle sends it by value."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ in _MAIN or "<locals>" in cls.__qualname__:
        return True
    found: Any = module
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def _refer_to(obj: object) -> tuple[Callable[..., Any], tuple[str, str]] | None:
    """Return how to find `obj`, a module or an attribute of one, in the other process; None if it is neither."""
    modules = {name: module for name, module in sys.modules.copy().items() if name not in _MAIN}
    for name, module in modules.items():
        if module is obj:
            return _resolve, (name, "")
    # Its own module comes first: other modules may have imported it from there.
    own = getattr(obj, "__module__", None) or getattr(obj, "__name__", "").rpartition(".")[0]
    for name in (own, *modules) if own in modules else modules:
        for attribute, value in list(getattr(modules[name], "__dict__", {}).items()):
            if value is obj:
                return _resolve, (name, attribute)
    return None


def _resolve(module: str, path: str) -> object:
    """Return a module, or the object with this dotted path in it."""
    importlib.import_module(module)
    found: Any = sys.modules[module]  # a module may replace its own entry with another object
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def _make_code(code: CodeType, file: str) -> CodeType:
    return code.replace(co_filename=file)


def _make_lru_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with an empty cache."""
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _make_cached_property(function: Callable[[Any], Any], name: str) -> "functools.cached_property[Any]":
    found = functools.cached_property(function)
    found.__set_name__(object, name)
    return found
