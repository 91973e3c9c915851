"""Random generators that user code holds: a data set, a model, a loss function, such as `self.rng = random.Random(0)`.

The state of such a generator advances from sample to sample, or from shard to shard, so what it gives would depend on
which process loaded or ran what before. Like the global generators they are seeded for each sample, for each shard, and
for what comes between two steps. `lockstep.held_objects` says where they are searched for. What was searched is looked
at again each time: a generator that was made since, by the code that draws from it, has drawn from a seed of its own.

[Note: paths of generators] Each is seeded by its path, so that two draw other numbers. Another path means other
numbers, and other bits of a trained model: names and their order stay as they are.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from lockstep.held_objects import Walk
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.shards import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGenerator:
    """A random generator that is held: torch's, NumPy's (of either kind) or Python's."""

    path: str
    """The attribute path to it; each path gets another seed."""
    generator: Any

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
        if isinstance(self.generator, random.Random):
            return partial(self.generator.setstate, self.generator.getstate())
        if hasattr(self.generator, "bit_generator"):
            bits = self.generator.bit_generator
            return partial(setattr, bits, "state", bits.state)
        return partial(self.generator.set_state, self.generator.get_state())


@final
class OwnGenerators:
    """The generators that are held by some roots, each with the path that theirs begin with."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._roots = list(roots)
        self._found: list[OwnGenerator] = []
        self._walk: Walk | None = None
        self._restore_calls: list[Callable[[], object]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnGenerators, (self._roots,)

    def find(self) -> Sequence[OwnGenerator]:
        """Return them, the nearest ones first, as far as they are there now (local)."""
        if self._walk is None:
            self._walk = Walk(self._roots, stops_at=generator_kinds())
        elif not self._walk.has_new_objects():
            return self._found
        kinds, found = generator_kinds(), dict[int, OwnGenerator]()
        for held in self._walk:
            if issubclass(type(held.value), kinds) and held.value is not torch.default_generator:
                found.setdefault(id(held.value), OwnGenerator(path=held.path, generator=held.value))
        self._found = [each for each in found.values() if _can_be_seeded(each)]
        return self._found

    def has_made(self) -> bool:
        """Whether there are generators that were in no place before: they have not been seeded (local)."""
        known = {each.path for each in self._found}
        return any(each.path not in known for each in self.find())

    def save(self) -> None:
        self._restore_calls = [each.keep_state() for each in self.find()]

    def restore(self) -> None:
        for restore in self._restore_calls:
            restore()
        self._restore_calls = []

    def seed_as_global(self) -> None:
        """Seed them by the seed that torch's global generator was given last (local)."""
        for each in self.find():
            each.seed(torch.initial_seed())


def generators_of_training(model: nn.Module, function: Any) -> OwnGenerators:
    """Return those that a function, or several, and the modules of a model hold. [Note: paths of generators]."""
    roots: list[tuple[str, Any]] = [("", function)]
    for path, module in model.named_modules():
        # The forward first: what it mentions is not to be found as a part of the module's class.
        roots += [(f"{path}.1", type(module).forward), (f"{path}.0", module)]
    return OwnGenerators(roots)


def generator_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *of_numpy)


def _can_be_seeded(own: OwnGenerator) -> bool:
    try:
        own.keep_state()
    except NotImplementedError:  # of the operating system's random numbers
        warnings.warn(
            f"The random generator {own.path.lstrip('.')}, a {type(own.generator).__name__}, has no state that can be "
            "set, so what it draws is something else in each run, and on each number of workers. If the weights depend "
            "on it, draw from the global generators of Python, NumPy or torch, which are seeded. (LS518)",
            stacklevel=stacklevel_of_user(),
        )
        return False
    return True
