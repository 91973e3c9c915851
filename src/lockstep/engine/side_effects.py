"""State that a shard leaves behind, in a forward, a loss function or a hook, anywhere but in buffers and parameters.

Each worker runs other shards, so such state would differ between workers. What modules, hooks and loss functions hold
(`lockstep.held_objects`) is compared before and after a worker's first shard, in the first step, and later where there
are other objects than there were. Numbers and texts beside parameters, in closures and in global names, and tensors
there that are written in place, are warned of at once, on that worker. All else is often only kept for somebody to look
at: so what it was is put back, another shard is computed and shard 0 once more, and if its loss, or a gradient where
hooks see those, is another one, the state matters. A value that only the first shard makes is found so too.
"""

import ast
import contextlib
import itertools
import operator
import types
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.engine.networks import number_of_values
from lockstep.errors import GroupError
from lockstep.held_objects import CACHED_FUNCTION, CONTAINERS, Held, Walk, set_again
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.loaders import LoaderIterator, num_yielded
from lockstep.torch_private.modules import version_of

_Seen = TypeVar("_Seen")
_PLAIN = (bool, int, float, complex, str, bytes)
_NUM_IDENTIFIED = 1 << 14
"""The most items of a container that are told apart, the last ones."""
_SEQUENCE_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_COUNTED = (int, float)
_FAR = 10_007
"""More shards, or samples, than the first steps have; no multiple of what anybody counts in."""
_MAX_BYTES = 1 << 22
"""Of a larger array of NumPy only the identity is seen, and a larger tensor is not put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenValue:
    held: Held
    """With the value itself, so that no other object gets its identity."""
    content: object
    copy: Any
    """A copy of a container, a tensor or an array; None of what is not put back but by setting it again."""

    @property
    def is_plain(self) -> bool:
        return isinstance(self.held.value, _PLAIN)

    def is_other(self, now: "_SeenValue") -> bool:
        is_same = self.held.value is now.held.value or (self.is_plain and now.is_plain)  # equal numbers may be others
        return not is_same or self.content != now.content

    def put_back(self) -> None:
        value = self.held.value
        if isinstance(value, CACHED_FUNCTION):
            value.cache_clear()  # what it had before will be computed again
        elif isinstance(value, itertools.count):
            value = itertools.count(*ast.literal_eval(f"[{str(self.content)[6:-1]}]"))
        elif type(value) in _SEQUENCE_ITERATORS and isinstance(self.copy, int):
            value.__setstate__(self.copy)
        elif isinstance(value, Tensor) and self.copy is not None:
            with torch.no_grad():
                value.copy_(self.copy)
        elif type(value) in CONTAINERS:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(self.copy)
        elif self.copy is not None:
            value[...] = self.copy
        with contextlib.suppress(AttributeError, TypeError, IndexError):  # what a class of the user's refuses
            set_again(self.held, value)


@final
class LeftState:
    """What modules, hooks and loss functions hold at a moment, besides parameters, buffers and generators."""

    def __init__(self, model: nn.Module, functions: Sequence[Any]) -> None:
        self._model, self._functions = model, functions
        roots = [*model.named_modules(), *((_title(each), each) for each in functions)]
        self._walk = Walk(roots, only_users=True)  # others may not bear to be put back
        self._seen = self._look(copies=True)
        self._known = frozenset(self._walk.dictionaries)
        self.has_iterators = any(map(_cannot_go_back, self._seen.values()))
        """Whether another call would use up what an iterator yields, such as a DataLoader's: it cannot be put back."""

    def changes(self) -> tuple[list[str], list[str]]:
        """Return by name what is state beyond doubt, as numbers and texts are, and what may only be kept to look at."""
        certain: dict[str, None] = {}
        possible: dict[str, None] = {}
        for before, after in self._others():
            if before is None or after is None:
                possible |= {_name_of(each.held): None for each in (before, after) if each is not None}
                continue
            is_plain = before.is_plain and after.is_plain
            is_written = isinstance(after.held.value, Tensor) and after.held.value is before.held.value
            is_certain = before.held.depth == 1 and (is_plain or is_written)
            is_certain = is_certain or (self.has_iterators and hasattr(type(before.held.value), "__next__"))
            (certain if is_certain else possible)[_name_of(before.held)] = None
        return list(certain), list(possible)

    def put_back(self) -> None:
        """Put back what is another now, and remove what an object has that was there without, as far as can be done."""
        for before, after in self._others():
            if before is not None:
                before.put_back()
            elif after is not None and isinstance(after.held.holder, dict) and id(after.held.holder) in self._known:
                after.held.holder.pop(after.held.key, None)

    def put_back_after(self, look: Callable[[], _Seen], *, otherwise: _Seen) -> _Seen:
        """Return what `look` sees, which calls the user's code again; `otherwise` where that cannot be (local)."""
        try:
            with OPEN_GROUPS.refused(), warnings.catch_warnings(action="ignore"):
                return look()
        except GroupError:
            raise
        except Exception:  # noqa: BLE001 - of the user's code, which counts its calls, say; or memory has run out
            return otherwise
        finally:
            self.put_back()

    @contextmanager
    def far_ahead(self) -> Iterator[list[str]]:
        """Let numbers that are others now be far larger, and lists that have grown far longer, within the block.

        So what code does after many shards is seen after a few. Yields the names of what is.
        """
        pairs = [(before, after) for before, after in self._others() if before is not None and after is not None]
        now = LeftState(self._model, self._functions)
        try:
            yield [_name_of(after.held) for before, after in pairs if _put_ahead(before, after)]
        finally:
            now.put_back()

    def _others(self) -> list[tuple[_SeenValue | None, _SeenValue | None]]:
        """Return what is another now, or was not there, or is no longer."""
        now = self._look(copies=False)
        pairs = [(self._seen.get(place), now.get(place)) for place in {**self._seen, **now}]
        return [(one, two) for one, two in pairs if one is None or two is None or one.is_other(two)]

    def _look(self, *, copies: bool) -> dict[object, _SeenValue]:
        found: dict[object, _SeenValue] = {}
        containers: set[int] = set()
        for held in self._walk:
            value, content = held.value, _content_of(held.value)
            if type(value) in CONTAINERS:
                containers.add(id(value))
            if held.depth == 0 or isinstance(value, nn.Module | nn.Parameter):
                continue
            is_item = id(held.holder) in containers and type(value) not in CONTAINERS
            if content is None or not is_item:  # else it is looked at with what contains it
                place = held.path if held.holder is None else (id(held.holder), held.key)
                copy = _copy_of(value) if copies else None
                found.setdefault(place, _SeenValue(held=held, content=content, copy=copy))
        return found


@final
class StateWatch:
    """In steps 1, 2, 4, 8, ... of an update: `begin`, `end_shard` after the first shard, `judge` with its gradients."""

    def __init__(self, model: nn.Module, function: Any) -> None:
        self._model = model
        self._functions = (function,)
        self._num_steps = 0
        self._before: LeftState | None = None
        self._changes: tuple[list[str], list[str]] | None = None
        self._told: set[str] = set()

    @property
    def is_first(self) -> bool:
        """Whether this is the first step, before there is memory of an optimizer's."""
        return self._num_steps == 1

    @property
    def has_told(self) -> bool:
        return bool(self._told)

    def begin(self) -> bool:
        """Return whether the first shard of the step is to be looked at."""
        self._num_steps += 1
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        self._before = LeftState(self._model, self._functions) if is_power_of_two else None
        return is_power_of_two

    def end_shard(self) -> None:
        assert self._before is not None
        self._changes = self._before.changes()

    def judge(
        self,
        loss: Tensor,
        compute: Callable[[], Sequence[Tensor]],
        compute_other: Callable[[], Sequence[Tensor]],
        *,
        can_repeat: bool,
    ) -> None:
        """Warn of what the shard has left that matters; compute it again, by itself and after another, to find out."""
        before, changes, self._before, self._changes = self._before, self._changes, None, None
        assert before is not None
        assert changes is not None
        certain, possible = changes
        can_repeat = can_repeat and not before.has_iterators
        matters = bool(possible) and can_repeat and self._is_other(before, loss, compute, compute_other)
        names = [*certain, *(possible if matters else ())]
        if new := [name for name in names if name not in self._told]:
            self._told.update(new)
            _warn(new, matters=matters)

    def _is_other(
        self,
        before: LeftState,
        loss: Tensor,
        compute: Callable[[], Sequence[Tensor]],
        compute_other: Callable[[], Sequence[Tensor]],
    ) -> bool:
        def is_other() -> bool:
            before.put_back()
            first, *gradients = compute()
            before.put_back()
            compute_other()
            again, *others = compute()
            if parameters != number_of_values(self._model):
                return False  # the forward writes parameters, and the losses differ for that: the step will fail
            pairs = [(loss, first), (loss, again), *zip(gradients, others, strict=False)]
            return len(gradients) != len(others) or not all(itertools.starmap(_are_equal, pairs))

        parameters = number_of_values(self._model)
        return LeftState(self._model, self._functions).put_back_after(is_other, otherwise=False)


def _warn(names: Sequence[str], *, matters: bool) -> None:
    more = f" and {len(names) - 1} more attributes" if len(names) > 1 else ""
    reason = (
        "The loss of a shard, or its gradient, is another one after another shard. "
        if matters
        else "If what the model computes depends on it, its weights will depend on the number of workers. "
    )
    warnings.warn(
        f"The forward of a shard has changed {names[0]}{more}, and each worker runs other shards. "
        f"{reason}Keep such state in a buffer (register_buffer), of which every shard of a step sees the same; a "
        "loss function that counts steps gets them as place: loss(model, batch, place). (LS518)",
        stacklevel=stacklevel_of_user(),
    )


def _put_ahead(before: _SeenValue, after: _SeenValue) -> bool:
    """Make a number, or those in a container, larger where it is another one, and a list longer; return whether."""
    value, copy = after.held.value, before.copy
    if type(value) in _COUNTED:
        if type(before.held.value) is type(value):
            set_again(after.held, value + _FAR)
        return type(before.held.value) is type(value)
    is_list = type(value) is list and type(copy) is list
    if not is_list and not (isinstance(value, dict) and isinstance(copy, dict)):
        return False
    items = list(enumerate(value)) if is_list else list(value.items())
    old = dict(enumerate(copy)) if is_list else copy
    counted = [key for key, item in items if type(item) in _COUNTED and old.get(key, item) != item]
    for key in counted:
        value[key] += _FAR
    has_grown = is_list and len(value) > len(copy)
    if has_grown:
        value.extend([value[-1]] * _FAR)
    return has_grown or bool(counted)


def _cannot_go_back(seen: _SeenValue) -> bool:
    value = seen.held.value
    return hasattr(type(value), "__next__") and not isinstance(value, (itertools.count, *_SEQUENCE_ITERATORS))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _title(function: Any) -> str:
    if isinstance(function, types.FunctionType):
        return f"{function.__name__}: "
    return type(function.__self__ if isinstance(function, types.MethodType) else function).__name__


def _name_of(held: Held) -> str:
    return held.path.replace(".self.", ".").replace(": .", ": ").lstrip(".")


def _copy_of(value: Any) -> Any:
    if type(value) in CONTAINERS:
        return value.copy()
    if isinstance(value, Tensor):
        is_small = value.layout is torch.strided and value.nbytes <= _MAX_BYTES
        return value.clone() if is_small and not value.requires_grad and not value.is_inference() else None
    if type(value) in _SEQUENCE_ITERATORS:
        return value.__reduce__()[-1]  # how many it has yielded
    is_array = getattr(type(value), "__module__", "") == "numpy" and type(value).__name__ == "ndarray"
    return value.copy() if is_array and value.nbytes <= _MAX_BYTES else None


def _identify(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return repr(value)
    return id(value), None if type(value) in CONTAINERS else _content_of(value)


def _content_of(value: Any) -> object:
    """Return what can be compared of a value; None of one that is only told from others."""
    kind = type(value)
    if kind in CONTAINERS:
        items = list(value.values() if isinstance(value, dict) else value)
        return len(items), tuple(map(_identify, items[-_NUM_IDENTIFIED:]))
    if isinstance(value, _PLAIN):
        return repr(value)  # NaN equals itself
    if isinstance(value, Tensor):
        return version_of(value) if not value.is_inference() else 0
    if getattr(kind, "__module__", "") == "numpy" and hasattr(value, "nbytes"):
        return zlib.crc32(value.tobytes()) if value.nbytes <= _MAX_BYTES and value.dtype.kind != "O" else 0
    if kind is bytearray:
        return bytes(value)
    if kind is types.GeneratorType:
        return value.gi_frame is not None and value.gi_frame.f_lasti
    if isinstance(value, LoaderIterator):
        return num_yielded(value)
    if kind is itertools.count:
        return repr(value)
    if kind is CACHED_FUNCTION:
        return value.cache_info()
    return operator.length_hint(value, -1) if hasattr(kind, "__length_hint__") else None
