"""Random generators that the model or the loss holds, such as `self.noise = torch.Generator()`.

Like the global generators they are seeded for each shard, and for what comes between two steps: their state would
depend on which shards a worker has run. They are searched for before the first shards, not only the first one, because
a forward may make its generator when it needs it.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from lockstep.data.contents import OwnGenerator, find_generators

_NUM_SEARCHES = 8
"""The first calls before which they are searched for."""
_NOT_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What a module holds for torch: parameters, hooks and the like."""


@final
class OwnGenerators:
    """Seeds the generators of a model and of a function, and puts earlier states back."""

    def __init__(self, model: nn.Module, function: Callable[..., Any] | Sequence[Callable[..., Any]]) -> None:
        self._model = model
        self._function = function
        self._found: Sequence[OwnGenerator] = ()
        self._num_searches = 0
        self._restore_calls: list[Callable[[], object]] = []

    def save(self) -> None:
        self._search()
        self._restore_calls = [each.keep_state() for each in self._found]

    def restore(self) -> None:
        for restore in self._restore_calls:
            restore()
        self._restore_calls = []

    def seed_as_global(self) -> None:
        """Seed them by the seed that torch's global generator was given last (local)."""
        self._search()
        for each in self._found:
            each.seed(torch.initial_seed())

    def _search(self) -> None:
        if self._num_searches < _NUM_SEARCHES:
            self._num_searches += 1
            self._found = _find(self._model, self._function)


def _find(model: nn.Module, function: Callable[..., Any] | Sequence[Callable[..., Any]]) -> list[OwnGenerator]:
    """Return the generators of a function and of every module, each once, without torch's global one."""
    found = {id(each.generator): each for each in find_generators(function)}
    for path, module in model.named_modules():
        held = {name: value for name, value in vars(module).items() if name not in _NOT_ATTRIBUTES}
        for each in find_generators((held, type(module).forward)):
            found.setdefault(id(each.generator), OwnGenerator(path=f"{path}{each.path}", generator=each.generator))
    return [each for each in found.values() if each.generator is not torch.default_generator]
