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

pickle names the type of a value that cannot be pickled, but not where it is. From "cannot pickle '_thread.lock' object"
alone the user would have to search every global variable that the function and the functions it calls use. So the value
is searched for (`find_in_call`), among what pickle stores of each.
"""

import contextlib
import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import cloudpickle

from lockstep.held_objects import CACHED_FUNCTION, contents_of, global_names

_MAIN = frozenset({"__main__", "__mp_main__"})
"""Modules that are the started script. In a worker they are another script."""
_Part = tuple["_Location", object]
_NO_FILE = "<sent separately>"
"""The file of code whose true one is beside it in the pickle."""


def pack(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


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
    if isinstance(obj, CACHED_FUNCTION) and (obj.__module__ in _MAIN or "<locals>" in obj.__qualname__):
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
    importlib.import_module(module)
    found: Any = sys.modules[module]  # a module may replace its own entry with another object
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def _make_code(code: CodeType, file: str) -> CodeType:
    return code.replace(co_filename=file)


def _make_lru_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _make_cached_property(function: Callable[[Any], Any], name: str) -> "functools.cached_property[Any]":
    found = functools.cached_property(function)
    found.__set_name__(object, name)
    return found


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a value is: an expression, and the words before and after it."""

    kind: str
    expression: str = ""
    user: str = ""

    def inside(self, step: str) -> "_Location":
        return _Location(self.kind, self.expression + step, self.user)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, f"`{self.expression}`" if self.expression else "", self.user)))


def find_in_call(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    parts: list[_Part] = [(_Location("the function", name_of(function)), function)]
    parts += [(_Location("the positional argument", f"args[{index}]"), value) for index, value in enumerate(args)]
    parts += [(_Location("the argument", name), value) for name, value in kwargs.items()]
    return _Search(getattr(function, "__module__", None) or "").first(parts)


def find_in_result(result: object) -> str | None:
    return _Search("").first([(_Location("the", "result"), result)])


def name_of(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)


@final
class _Search:
    """One search, in functions of the script and of `module` alone: variables of libraries mean nothing to a user."""

    def __init__(self, module: str) -> None:
        self._modules = frozenset({"__main__", module})
        self._seen: set[int] = set()

    def first(self, parts: Iterable[_Part]) -> str | None:
        """Return the first of these values, or of their parts, that cannot be pickled, where it is and why."""
        return next((found for location, value in parts if (found := self._find(location, value)) is not None), None)

    def _find(self, location: _Location, value: object) -> str | None:
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        try:
            pack(value)
        except Exception as error:  # noqa: BLE001 - a class may raise anything when it is pickled
            parts: list[_Part] = []
            with contextlib.suppress(Exception):  # and when pickle asks it for its state
                parts += self._parts(location, value)
            kind = type(value)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            return self.first(parts) or f"{location} is of type {name}: {error}"
        return None

    def _parts(self, location: _Location, value: Any) -> Iterable[_Part]:
        match value:
            case FunctionType():
                return _function_parts(value) if value.__globals__.get("__name__") in self._modules else ()
            case type():
                return _class_parts(value)
            case ModuleType():
                return ()
            case functools.partial():
                names = ("func", "args", "keywords")
                return [(location.inside(f".{name}"), getattr(value, name)) for name in names]
            case MethodType():
                return [(location.inside(".__self__"), value.__self__), (location.inside(".__func__"), value.__func__)]
            case dict():
                return [(location.inside(f"[{key!r}]"), part) for key, part in value.items()] + [
                    (location, key) for key in value
                ]
            case list() | tuple():
                return [(location.inside(f"[{index}]"), part) for index, part in enumerate(value)]
            case set() | frozenset():
                return [(location, part) for part in value]
            case _:
                return _state_parts(location, value)


def _function_parts(function: FunctionType) -> Iterator[_Part]:
    name = name_of(function)
    for variable in global_names(function.__code__):
        if variable in function.__globals__:
            yield _Location("the global variable", variable, f"that `{name}` uses"), function.__globals__[variable]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from (
            (_Location("the variable", variable, f"around `{name}` that it uses"), each) for each in contents_of(cell)
        )
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield _Location("a default value of an argument of", name), default
    for attribute, value in vars(function).items():
        yield _Location("the attribute", f"{name}.{attribute}"), value


def _class_parts(cls: type) -> Iterator[_Part]:
    for name, attribute in vars(cls).items():
        location = _Location("the attribute", f"{cls.__name__}.{name}")
        match attribute:
            case classmethod() | staticmethod():
                yield location, attribute.__func__
            case property():
                yield from ((location, function) for function in (attribute.fget, attribute.fset, attribute.fdel))
            case _:
                yield location, attribute


def _state_parts(location: _Location, value: Any) -> Iterator[_Part]:
    """Yield what pickle stores of an object: attributes, arguments of its class, items."""
    reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None  # noqa: PLR2004 - its location, see object.__reduce__
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((location.inside(f".{name}"), attribute) for name, attribute in part.items())
        else:
            yield location, part
    for parts in (reduced[1], *reduced[3:5]):
        yield from ((location, part) for part in parts or ())
