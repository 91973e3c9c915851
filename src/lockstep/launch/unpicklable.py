"""Finding the value that cannot be pickled, for the error message.

pickle names the type of this value, but not where it is. From "cannot pickle '_thread.lock' object" alone the user
would have to search every global variable that the function and the functions it calls use.
"""

import contextlib
import functools
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from lockstep.held_objects import contents_of, global_names
from lockstep.launch.pickling import pack_into

_Part = tuple["_Location", object]


@dataclass(frozen=True, slots=True)
class Unpicklable:
    """A value that cannot be pickled although all its known parts can."""

    location: str
    """Where it is: "the global variable `state.lock` that `load` uses"."""
    value: object
    error: Exception

    def describe(self) -> str:
        kind = type(self.value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return f"{self.location} is of type {name}: {self.error}"


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


def find_in_call(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Unpicklable | None:
    """Return the value in a call that cannot be pickled; None if each can."""
    parts: list[_Part] = [(_Location("the function", name_of(function)), function)]
    parts += [(_Location("the positional argument", f"args[{index}]"), value) for index, value in enumerate(args)]
    parts += [(_Location("the argument", name), value) for name, value in kwargs.items()]
    return _Search(getattr(function, "__module__", None) or "").first(parts)


def find_in_result(result: object) -> Unpicklable | None:
    return _Search("").first([(_Location("the", "result"), result)])


def name_of(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)


@final
class _Search:
    """One search, in functions of the script and of `module` alone: variables of libraries mean nothing to a user."""

    def __init__(self, module: str) -> None:
        self._modules = frozenset({"__main__", module})
        self._seen: set[int] = set()

    def first(self, parts: Iterable[_Part]) -> Unpicklable | None:
        """Return the first of these values, or of their parts, that cannot be pickled."""
        return next((found for location, value in parts if (found := self._find(location, value)) is not None), None)

    def _find(self, location: _Location, value: object) -> Unpicklable | None:
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        try:
            pack_into(_Nowhere(), value)
        except Exception as error:  # noqa: BLE001 - a class may raise anything when it is pickled
            parts: list[_Part] = []
            with contextlib.suppress(Exception):  # and when pickle asks it for its state
                parts += self._parts(location, value)
            return self.first(parts) or Unpicklable(str(location), value, error)
        return None

    def _parts(self, location: _Location, value: Any) -> Iterable[_Part]:
        """Return the values that are pickled with a value."""
        match value:
            case types.FunctionType():
                return _function_parts(value) if value.__globals__.get("__name__") in self._modules else ()
            case type():
                return _class_parts(value)
            case types.ModuleType():
                return ()
            case functools.partial():
                names = ("func", "args", "keywords")
                return [(location.inside(f".{name}"), getattr(value, name)) for name in names]
            case types.MethodType():
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


class _Nowhere:
    def write(self, data: bytes, /) -> object:
        return len(data)


def _function_parts(function: types.FunctionType) -> Iterator[_Part]:
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
