"""Networks that a loss function uses and that are no part of the model: a teacher, the other half of a GAN.

The trainer does not train them. But a forward may write their buffers, and the loss function may write their
parameters, as an average of weights; then the result would depend on who runs which shard. So their buffers are treated
as the model's are ([Note: buffers of shard 0]), writes to their parameters are refused, and their values are compared
between workers.
They are searched for when an engine is made: in closures, defaults, partials, and in the global names and the
attributes of bound objects that the functions mention. An object may hold others too: an average that rank 0 alone has.
"""

import inspect
import types
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

_NUM_OBJECTS = 256
"""The most objects that a search visits."""
_NUM_ITEMS = 32
"""The most items visited of a container: a longer one holds data."""
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, Tensor, str, bytes, int, float, complex, type(None))


def find_networks(functions: Sequence[Any], model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters or buffers that functions use and that are not within the model, by name."""
    own = set(model.modules())
    found: dict[str, nn.Module] = {}
    seen: set[object] = set()
    waiting: deque[tuple[str, Any]] = deque(("", function) for function in functions)
    while waiting and len(seen) < _NUM_OBJECTS:
        name, value = waiting.popleft()
        # A bound method is made anew each time that it is looked up.
        key = (id(value.__self__), id(value.__func__)) if isinstance(value, types.MethodType) else id(value)
        if isinstance(value, _OPAQUE) or key in seen:
            continue
        seen.add(key)
        if isinstance(value, nn.Module):
            foreign = value not in own and not own <= set(value.modules())
            if foreign and next(_tensors(value), None) is not None:
                found[name or type(value).__name__] = value
        waiting.extend((f"{name}.{part}".strip("."), each) for part, each in _parts(value))
    return found


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for number, (name, part) in enumerate(islice(value.items(), _NUM_ITEMS)):
            # The text of a tensor, as in an optimizer's state, takes milliseconds, and changes with its values.
            yield str(number if isinstance(name, Tensor) else name), part
    elif isinstance(value, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(value[:_NUM_ITEMS]))
    elif isinstance(value, partial):
        yield from ((getattr(value.func, "__name__", "func"), value.func), ("args", value.args), ("", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from _parts_of_method(value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif not isinstance(value, nn.Module):
        if isinstance(call := vars(type(value)).get("__call__"), types.FunctionType):
            yield from _parts_of_method(call, value)
        else:
            yield from islice(getattr(value, "__dict__", {}).items(), _NUM_ITEMS)


def _parts_of_method(function: Any, owner: Any) -> Iterator[tuple[str, Any]]:
    """Return what a method mentions of its object, and what else it mentions."""
    if isinstance(owner, nn.Module | type):
        yield "self", owner
    else:
        held = getattr(owner, "__dict__", {})
        for name in _names_in(getattr(function, "__code__", None)):
            if name in held:
                yield name, held[name]
            elif isinstance(method := inspect.getattr_static(type(owner), name, None), types.FunctionType):
                yield "", types.MethodType(method, owner)
    if isinstance(function, types.FunctionType):
        yield from _parts_of_function(function)


def _names_in(code: types.CodeType | None) -> Iterator[str]:
    """Return the names that a function mentions, in the functions within it too."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names_in(constant)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    yield from _parts_of_defaults(function)
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module | partial | types.MethodType | dict | list) or (
            isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        ):
            yield name, value


def _parts_of_defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
