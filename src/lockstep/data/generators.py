"""Random generators that a data set holds, such as `self.rng = np.random.default_rng(0)`.

Their state advances from sample to sample, so a sample would depend on which process loaded which samples before. Like
the global generators they are seeded for each sample. The search covers the data set's attributes and what those hold
(transforms, wrapped data sets, partials, closures), and the global names that its `__getitem__` and the `__call__` or
`forward` of its transforms mention. It is limited, because it is repeated for each slice.
"""

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lockstep.shards import derive_seed

_NUM_OBJECTS = 256
"""The most objects that a search visits."""
_NUM_ITEMS = 32
"""The most items visited of a list or a dictionary: a longer one holds data."""
_CALLED = ("__getitem__", "__getitems__", "__call__", "forward")
_OPAQUE = (type, types.ModuleType, Tensor, str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGenerator:
    """A random generator that a data set holds."""

    path: str
    """The attribute path to it; each path gets another seed."""
    generator: Any
    """The generator: torch's, NumPy's (of either kind) or Python's."""

    def seed(self, seed: int) -> None:
        own = derive_seed(f"generator {self.path}", seed)
        if isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(own)
        elif isinstance(self.generator, random.Random):
            self.generator.seed(own)
        elif hasattr(self.generator, "bit_generator"):
            bits = self.generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            self.generator.seed(own % 2**32)

    def keep_state(self) -> Callable[[], object]:
        """Return a function that restores the present state."""
        if isinstance(self.generator, torch.Generator):
            return partial(self.generator.set_state, self.generator.get_state())
        if isinstance(self.generator, random.Random):
            return partial(self.generator.setstate, self.generator.getstate())
        if hasattr(self.generator, "bit_generator"):
            bits = self.generator.bit_generator
            return partial(setattr, bits, "state", bits.state)
        return partial(self.generator.set_state, self.generator.get_state())


def find_generators(root: object) -> list[OwnGenerator]:
    """Return the generators that an object holds, itself or in what it holds; the nearest ones first."""
    kinds = _kinds()  # `issubclass`, because torch's classes answer `isinstance` in Python
    found: list[OwnGenerator] = []
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([] if issubclass(type(root), _OPAQUE) else [("", root)])
    while waiting and len(seen) < _NUM_OBJECTS:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), kinds):
            found.append(OwnGenerator(path=path, generator=value))
        else:
            parts = _parts(value, kinds)
            waiting.extend((f"{path}.{name}", part) for name, part in parts if not issubclass(type(part), _OPAQUE))
    return found


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *of_numpy)


def _parts(value: object, kinds: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    """Return what an object holds, by name."""
    if isinstance(value, dict):
        # Not the text of any key: an object's has its address, which is another one in each process, and that of a
        # parameter, as an optimizer's state has for keys, its values.
        for number, (key, part) in enumerate(islice(value.items(), _NUM_ITEMS)):
            yield str(key) if isinstance(key, str | int) else str(number), part
    elif isinstance(value, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(value[:_NUM_ITEMS]))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, kinds)
    else:
        yield from islice(getattr(value, "__dict__", {}).items(), _NUM_ITEMS)
        methods = (getattr(type(value), name, None) for name in _CALLED)
        for method in methods:
            if isinstance(method, types.FunctionType):
                yield from _parts_of_function(method, kinds)


def _parts_of_function(function: types.FunctionType, kinds: tuple[type, ...]) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    for name in function.__code__.co_names:
        if issubclass(type(value := function.__globals__.get(name)), kinds):
            yield name, value
