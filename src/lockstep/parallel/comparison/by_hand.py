"""Gradients that a script averages by hand: accumulated under `no_sync()`, reduced by its own calls, and stepped with.

    with model.no_sync():
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()

No call shows that it was done for every gradient. But then all ranks step with the same gradients, bit for bit, and
with gradients of its own each rank has others. So each rank publishes a number for its gradients in the group's store,
and waits a moment for those of the others. No collective: ranks that do not step by hand would not take part in it.
"""

import time
from collections.abc import Sequence
from typing import Final, final

import torch.distributed as dist
from torch import nn

from lockstep.comm import World, group_store
from lockstep.reduce.tensor_bits import glance_at_bits

_WAIT_SECONDS: Final = 4.0
"""The other ranks have just taken part in the same all-reduce, if there was one."""
_PAUSE_SECONDS: Final = 0.002
_NUM_FIRST: Final = 4
_NUM_BETWEEN: Final = 64
"""Compared are the first steps, then every so many-th."""


@final
class HandAveraging:
    """Finds out whether gradients that were not reduced are the same on all ranks all the same."""

    def __init__(self, world: World, model_number: int) -> None:
        store = None if world.group is None else group_store(world.group)
        self._store = None if store is None else dist.PrefixStore(f"lockstep/by_hand/{model_number}", store)
        self._world = world
        self._num_steps = 0

    def is_done(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether all ranks are about to step with the same gradients (each rank with such a step calls)."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if self._store is None:
            return False
        if number >= _NUM_FIRST and number % _NUM_BETWEEN:
            return True
        gradients = [each.grad for each in parameters]
        there = [each for each in gradients if each is not None]
        own = hash((glance_at_bits(*there), *(each is None for each in gradients)))
        self._store.set(f"{number}/{self._world.rank}", f"{own}")
        keys = [f"{number}/{rank}" for rank in range(self._world.world_size)]
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        return all(int(self._store.get(key)) == own for key in keys)
