"""The DistributedSamplers of this process: are they made alike on all ranks, and has each epoch an order of its own?

A wrapper is not given the samplers of a script, so it looks for them among the objects of the process: once, in the
second reduction, when there are batches already.
"""

import gc
import warnings
import weakref
from collections.abc import Sequence
from numbers import Number
from typing import Any, final

from torch.utils.data import BatchSampler, DistributedSampler

from lockstep.comm import World
from lockstep.parallel.comparison.data_items import describe_items, number_items
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.model import Description

_NAMES = ("num_replicas", "shuffle", "seed", "epoch", "drop_last", "num_samples")
"""What must be the same on all ranks."""


@final
class DataSamplers:
    """Looks at the samplers of one rank: at all for what must be the same, at those that shuffle for their epochs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: list[weakref.ref[DistributedSampler[Any]]] = []
        self._items: dict[int, dict[str, str]] = {}
        self._epoch = 0
        self._num_samples = 0
        self._batch_size = 0
        self._has_warned = False
        self._is_compared = True

    def find(self) -> None:
        # By their types, of which there are few; not by `isinstance`, which runs the code of objects that stand for
        # others.
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedSampler)}
        found = [each for each in objects if type(each) in kinds and _is_complete(each)] if kinds else []
        # Not the DataLoader, which may be gone: its iterator holds this and not the loader.
        cut = [each for each in objects if type(each) is BatchSampler] if found else []
        self._batch_size = max(
            (each.batch_size for each in cut if any(each.sampler is one for one in found)), default=0
        )
        self._found = [weakref.ref(each) for each in found]
        # One replica: each rank may have data of its own.
        self._items = {id(each): describe_items(each.dataset) for each in found if each.num_replicas != 1}
        for sampler in found:
            if sampler.shuffle and sampler.num_replicas != self._world.world_size and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"A DistributedSampler was made for {sampler.num_replicas} replicas, and the model is trained on "
                    f"{self._world.world_size} ranks: samples are left out, or seen by several ranks. Make it with "
                    f"num_replicas={self._world.world_size}, or leave that out. This warning is given once. (LS317)",
                    stacklevel=stacklevel_of_user(),
                )
        self._begin_epoch()

    def number(self) -> int:
        """Return a number for what must be the same on all ranks (local)."""
        samplers = self._alive() if self._found and self._is_compared else ()
        # Sorted: the order in which the collector lists objects depends on when it ran on this rank.
        numbers = (
            (*(int(getattr(each, name)) for name in self._names_of(each)), number_items(self._items.get(id(each), {})))
            for each in samplers
        )
        return hash(tuple(sorted(numbers)))

    def describe(self) -> tuple[Description, ...]:
        described = [
            {**{name: repr(getattr(each, name)) for name in self._names_of(each)}, **self._items.get(id(each), {})}
            for each in (self._alive() if self._is_compared else ())
        ]
        return tuple(sorted(described, key=lambda each: tuple(each.values())))

    def compare(self, described: Sequence[Sequence[Description]]) -> None:
        """Compare them no more if ranks have unlike numbers of them (local; `described` is of all ranks)."""
        if len(set(map(len, described))) > 1:
            self._is_compared = False  # else the ranks would exchange all that they compare, in each backward

    def count(self, num_samples: int) -> None:
        """Count the samples of a step, and warn if a second epoch has the order of the first (local)."""
        samplers = self._shuffling() if self._found and not self._has_warned else []
        if len(samplers) != 1:
            return  # of several, which one is of the training data is not known
        (sampler,) = samplers
        if num_samples > self._batch_size:
            self._batch_size = 0  # the first dimension is not that of samples: views, or tokens
            return
        if sampler.epoch != self._epoch or not num_samples:
            self._begin_epoch()
        self._num_samples += num_samples
        if self._num_samples > sampler.num_samples:
            self._has_warned = True
            if getattr(sampler, "is_order_told", False):
                return  # lockstep.DistributedSampler, which has warned by itself
            sampler.is_order_told = True  # type: ignore[attr-defined]
            warnings.warn(
                f"A second epoch of a DistributedSampler has begun, and its epoch is still {sampler.epoch}: it "
                "shuffles by seed and epoch, so every epoch has the same order. Call sampler.set_epoch(epoch) before "
                "each epoch, with another number each time. This warning is given once. (LS316)",
                stacklevel=stacklevel_of_user(),
            )

    @staticmethod
    def _names_of(sampler: DistributedSampler[Any]) -> Sequence[str]:
        return _NAMES if sampler.num_replicas != 1 else _NAMES[:1]

    def _begin_epoch(self) -> None:
        self._num_samples = 0
        self._epoch = next((each.epoch for each in self._shuffling()), 0)

    def _shuffling(self) -> list[DistributedSampler[Any]]:
        return [each for each in self._alive() if each.shuffle]

    def _alive(self) -> list[DistributedSampler[Any]]:
        return [each for each in (reference() for reference in self._found) if each is not None]


def _is_complete(sampler: object) -> bool:
    """Return whether a sampler has what torch's has: a subclass may not have called its `__init__`."""
    return hasattr(sampler, "dataset") and all(isinstance(getattr(sampler, name, None), Number) for name in _NAMES)
