"""Do the ranks wrap their models in the same order?

    for name in {"encoder", "decoder"}:        # a set of strings has another order in each process
        models[name] = ls.DistributedDataParallel(nets[name])

The first model on rank 0 is paired with the first one on rank 1. If both have the same shapes, they would get each
other's parameters and gradients. Two things show it:

- *values*, when a model is wrapped: the ranks have wrapped models with the same values by now, in another order.
- *names*, in the first backwards: a model is an attribute or has a key in a dictionary, and its name on one rank is
  that of another model on rank 0, and the other way round. For models of equal values, or of others on each rank.
"""

import gc
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, group_store
from lockstep.errors import ParameterMismatchError
from lockstep.reduce import TrainedModel
from lockstep.reduce.tensor_bits import glance_at_bits

NamesByModel = Mapping[int, frozenset[str]]
"""Under which names a rank holds each model that it has wrapped, by number."""
_REMEDY = (
    "Wrap models in the same order on every rank: keep them in a list or a dictionary that is filled in a fixed order, "
    "and do not loop over a set. If that is meant, wrap with compare=False."
)
_FIRST_REDUCTION: Final = 1
_LAST_REDUCTION: Final = 5
"""Names are compared in the reductions after the first and before the last of these."""

_NUM_LAST: Final = 8
"""So many models that were wrapped last are looked at: a process may wrap thousands, one after the other."""


@final
class WrapOrder:
    """Compares in which order one rank has wrapped its models over a group; `number` is which it is, from 1 on."""

    def __init__(self, world: World, number: int) -> None:
        store = None if world.group is None else group_store(world.group)
        self._store = None if store is None else dist.PrefixStore(f"lockstep/wrapped/{world.rank}", store)
        self._world = world
        self._number = number
        self.wrapper: Callable[[], nn.Module | None] = _no_wrapper
        self._names: frozenset[str] = frozenset()

    def compare_values(self, model: TrainedModel) -> None:
        """Compare the models that were wrapped so far, before this one gets rank 0's values (collective)."""
        if self._store is None:
            return
        plain = [each for _, each in model.parameters() if type(each.detach()) is Tensor]
        self._store.set(f"values/{self._number}", f"{glance_at_bits(*plain)}")
        if self._number == 1:
            return
        # A model that was wrapped with init_sync=False or compare=False has left none.
        own = [int(self._read(f"values/{number}") or 0) for number in self._last_numbers(self._number)]
        first, *others = self._world.gather_objects(own)
        for rank, found in enumerate(others, start=1):
            if found != first and sorted(found) == sorted(first):
                pairs = enumerate(zip(found, first, strict=True))
                index = next(index for index, (here, there) in pairs if here != there)
                numbers = self._last_numbers(self._number)
                raise ParameterMismatchError(
                    f"Wrapped model {numbers[index]} on rank {rank} is wrapped model "
                    f"{numbers[first.index(found[index])]} on rank 0: the models that were wrapped have the same "
                    f"parameters on both, in another order, and would get each other's gradients. {_REMEDY} (LS304)"
                )

    def number_names(self, module: nn.Module | None, num_reductions: int) -> int:
        """Return a number for the names under which this rank holds the model; 0 if not now (local)."""
        if not _FIRST_REDUCTION <= num_reductions < _LAST_REDUCTION or self._store is None or module is None:
            return 0
        if num_reductions == _FIRST_REDUCTION and self._count_models() > 1:  # it takes some milliseconds
            wrapper = self.wrapper()
            self._names = frozenset(_names_of([module] if wrapper is None else [module, wrapper]))
            self._store.set(f"names/{self._number}", json.dumps(sorted(self._names)))
        return zlib.crc32(repr(sorted(self._names)).encode())

    def describe(self) -> NamesByModel:
        """Return the names of all models that this rank has wrapped and looked at (local)."""
        if self._store is None:
            return {}
        held = {number: self._read(f"names/{number}") for number in self._last_numbers(self._count_models())}
        return {number: frozenset(json.loads(text)) for number, text in held.items() if text}

    def _read(self, key: str) -> str:
        assert self._store is not None
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _count_models(self) -> int:
        assert self._store is not None
        return int(self._store.add("count", 0))

    @staticmethod
    def _last_numbers(number: int) -> range:
        return range(max(1, number - _NUM_LAST + 1), number + 1)


def number_model(world: World) -> int:
    """Return which of the models that this rank wraps over its group is the next one, from 1 on (local)."""
    assert world.group is not None
    store = group_store(world.group)
    return 0 if store is None else int(store.add(f"lockstep/wrapped/{world.rank}/count", 1))


def find_other_order(ranks: Sequence[NamesByModel]) -> str:
    """Return in words how the names show that models were wrapped in another order; empty if they do not (pure)."""
    first, *others = map(_without_common, ranks)
    for rank, found in enumerate(others, start=1):
        both = sorted(found.keys() & first.keys())
        moved = [number for number in both if found[number] and not found[number] & first[number]]
        for number in moved:
            for other in moved:
                names = found[number] & first[other]
                if other != number and names and found[other] & first[number]:
                    return (
                        f"Wrapped model {number} on rank {rank} is called {min(names)!r}, which is wrapped model "
                        f"{other} on rank 0: they would get each other's gradients. {_REMEDY}"
                    )
    return ""


def _without_common(names: NamesByModel) -> NamesByModel:
    """Return the names without those that several models have, as the `module` of every wrapper."""
    counts = Counter(name for held in names.values() for name in held)
    return {number: frozenset(name for name in held if counts[name] == 1) for number, held in names.items()}


def _names_of(held: Sequence[object]) -> Iterator[str]:
    """Yield the attributes and keys under which any of these is held."""
    for holder in gc.get_referrers(*held):  # one look at all objects of the process
        items: dict[Any, Any] = holder if type(holder) is dict else getattr(holder, "__dict__", {})
        if "__builtins__" not in items:
            yield from (
                key for key, value in list(items.items()) if type(key) is str and any(value is one for one in held)
            )


def _no_wrapper() -> None:
    """Return no wrapper: none is known."""
