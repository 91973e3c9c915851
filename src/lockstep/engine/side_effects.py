"""State that a forward or a loss function leaves behind in plain attributes, closures and global names.

Each worker runs other shards, so such state would differ between workers. In the first step, what modules and loss
functions hold is compared before and after each worker's first shard. Numbers, texts, and tensors that are written in
place are warned of at once, on that worker. A list that has grown, or an attribute that is another tensor now, is often
only kept for somebody to look at: so the loss of shard 0 is computed once more, and if it is another one, the state
matters.
"""

import types
import warnings
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.modules import version_of

_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
"""Not their other subclasses, which may refuse to be written."""
_NUM_ITEMS = 64
"""The most items of a container that are looked at, the last ones."""
_MAX_BYTES = 1 << 22
"""Of a larger array of NumPy only the identity is seen."""
_NOT_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What a module holds for torch: parameters, buffers, hooks and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenValue:
    identity: int
    content: object
    """What can be compared of it."""
    value: Any
    """Itself, so that no other object gets its identity; a copy of a container."""
    put_back: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanges:
    """What a shard has changed, by name."""

    certain: tuple[str, ...]
    """State beyond doubt: numbers, texts, tensors that were written in place."""
    possible: tuple[str, ...]
    """What may be kept only to be looked at."""


@final
class LeftState:
    """What modules and loss functions hold at a moment, besides parameters, buffers and generators."""

    def __init__(self, model: nn.Module, functions: Sequence[Any]) -> None:
        self._model = model
        self._functions = functions
        self._seen = dict(self._look())

    def changes(self) -> StateChanges:
        now = dict(self._look())
        certain: list[str] = []
        possible: list[str] = []
        for name, before in self._seen.items():
            after = now.get(name)
            if after is None:
                continue
            is_plain = isinstance(before.value, _PLAIN) and isinstance(after.value, _PLAIN)
            if before.content == after.content and (is_plain or before.identity == after.identity):
                continue  # equal numbers may be other objects
            is_written = isinstance(after.value, Tensor) and before.identity == after.identity
            (certain if is_plain or is_written else possible).append(name)
        return StateChanges(certain=tuple(certain), possible=tuple(possible))

    def put_back(self, names: Sequence[str]) -> None:
        """Put lists, dictionaries and other objects of these names back, as far as that can be done."""
        for seen in (self._seen[name] for name in names if name in self._seen):
            seen.put_back(seen.value)

    def _look(self) -> Iterator[tuple[str, _SeenValue]]:
        for path, module in self._model.named_modules():
            held = vars(module)
            for name in [name for name in held if name not in _NOT_ATTRIBUTES]:
                yield from _see(f"{path}.{name}" if path else name, held[name], held, name)
        for function in self._functions:
            yield from _look_at_function(function)


def warn_of_state(changes: StateChanges) -> None:
    names = [*changes.certain, *changes.possible]
    if names:
        more = f" and {len(names) - 1} more attributes" if len(names) > 1 else ""
        matters = (
            "The loss of the shard is another one when it is computed again. "
            if changes.possible
            else "If what the model computes depends on it, its weights will depend on the number of workers. "
        )
        warnings.warn(
            f"The forward of a shard has changed {names[0]}{more}, and each worker runs other shards. "
            f"{matters}Keep such state in a buffer (register_buffer), of which every shard of a step sees the same; a "
            "loss function that counts steps gets them as place: loss(model, batch, place). (LS518)",
            stacklevel=stacklevel_of_user(),
        )


def _look_at_function(function: Any) -> Iterator[tuple[str, _SeenValue]]:
    if isinstance(function, types.MethodType):
        yield from _look_at_function(function.__func__)
        function = function.__self__
    if isinstance(function, nn.Module):
        return
    if not isinstance(function, types.FunctionType):
        held = getattr(function, "__dict__", {})
        for name in list(held):
            yield from _see(f"{type(function).__name__}.{name}", held[name], held, name)
        return
    prefix = function.__qualname__.rpartition(".")[2]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
        yield from _see(f"{prefix}: {name}", value, _ClosureCell(cell), "")
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield from _see(f"{prefix}: {name}", function.__globals__[name], function.__globals__, name)


@final
class _ClosureCell:
    """A cell of a closure, written as an item."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __setitem__(self, _name: str, value: Any) -> None:
        self._cell.cell_contents = value


def _see(name: str, value: Any, holder: Any, key: str) -> Iterator[tuple[str, _SeenValue]]:
    """Yield what is seen of a value, or nothing if it cannot be compared."""

    def set_again(before: Any) -> None:
        holder[key] = before

    if isinstance(value, nn.Module | nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad):
        return
    content = _content_of(value)
    if type(value) in _CONTAINERS:
        items = list(value.values() if isinstance(value, dict) else value)
        content = len(items), tuple(map(_identify, items[-_NUM_ITEMS:]))

        def fill_again(before: Any) -> None:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(before)

        yield name, _SeenValue(identity=id(value), content=content, value=value.copy(), put_back=fill_again)
    elif content is not None or value is None:
        yield name, _SeenValue(identity=id(value), content=content, value=value, put_back=set_again)


def _identify(value: Any) -> object:
    return _content_of(value) if isinstance(value, _PLAIN) else (id(value), _content_of(value))


def _content_of(value: Any) -> object:
    """Return what can be compared of a number, a text, a tensor or an array; None for others."""
    if type(value) in _PLAIN:
        return repr(value)  # NaN equals itself
    if isinstance(value, Tensor):
        return version_of(value) if not value.is_inference() else 0
    if type(value).__module__ == "numpy" and hasattr(value, "nbytes"):
        return zlib.crc32(value.tobytes()) if value.nbytes <= _MAX_BYTES and value.dtype.kind != "O" else 0
    return None
