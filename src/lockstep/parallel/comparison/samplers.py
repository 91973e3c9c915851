"""The DistributedSamplers of this process: are they made for these ranks, and does each epoch have an order of its own?

A wrapper is not given the samplers of a script, so it looks for them among the objects of the process: once, in the
second reduction, when there are batches already.
"""

import gc
import warnings
import weakref
from typing import Any, final

from torch.utils.data import BatchSampler, DistributedSampler

from lockstep.comm import World
from lockstep.parallel.user_code import stacklevel_of_user
from lockstep.reduce.optimizer_options import Description

_NAMES = ("num_replicas", "seed", "epoch", "drop_last")
"""What must be the same on all ranks."""


@final
class ShufflingSamplers:
    """Looks at the samplers that shuffle, on one rank.

    Args:
        world: The ranks of the wrapper.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: list[weakref.ref[DistributedSampler[Any]]] = []
        self._epoch = 0
        self._num_samples = 0
        self._batch_size = 0
        self._has_warned = False

    def find(self) -> None:
        """Look for them (local)."""
        # By their types, of which there are few; not by `isinstance`, which runs the code of objects that stand for
        # others.
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedSampler)}
        found = [each for each in objects if type(each) in kinds] if kinds else []
        # Not the DataLoader, which may be gone: its iterator holds this and not the loader.
        cut = [each for each in objects if type(each) is BatchSampler] if found else []
        self._batch_size = max(
            (each.batch_size for each in cut if any(each.sampler is one for one in found)), default=0
        )
        self._found = [weakref.ref(each) for each in found if each.shuffle]
        for sampler in found:
            if sampler.shuffle and sampler.num_replicas != self._world.world_size and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"A DistributedSampler was made for {sampler.num_replicas} replicas, and the model is trained on "
                    f"{self._world.world_size} ranks: samples are left out, or seen by several ranks. Make it with "
                    f"num_replicas={self._world.world_size}, or leave that out. This warning is given once.",
                    stacklevel=stacklevel_of_user(),
                )
        self._begin_epoch()

    def number(self) -> int:
        """Return a number for what must be the same on all ranks (local)."""
        samplers = self._alive() if self._found else ()
        # Sorted: the order in which the collector lists objects depends on when it ran on this rank.
        return hash(tuple(sorted((each.num_replicas, each.seed, each.epoch, each.drop_last) for each in samplers)))

    def describe(self) -> tuple[Description, ...]:
        """Return the same in words (local)."""
        described = [{name: repr(getattr(each, name)) for name in _NAMES} for each in self._alive()]
        return tuple(sorted(described, key=lambda each: tuple(each.values())))

    def count(self, num_samples: int) -> None:
        """Count the samples of a step, and warn if a second epoch has the order of the first (local)."""
        samplers = self._alive() if self._found and not self._has_warned else []
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
            warnings.warn(
                f"A second epoch of a DistributedSampler has begun, and its epoch is still {sampler.epoch}: it "
                "shuffles by seed and epoch, so every epoch has the same order. Call sampler.set_epoch(epoch) before "
                "each epoch, with another number each time. This warning is given once.",
                stacklevel=stacklevel_of_user(),
            )

    def _begin_epoch(self) -> None:
        self._num_samples = 0
        self._epoch = next((each.epoch for each in self._alive()), 0)

    def _alive(self) -> list[DistributedSampler[Any]]:
        return [each for each in (reference() for reference in self._found) if each is not None]
