"""Training with uneven inputs: what a rank that has run out of them does until the others are done.

Per forward of the ranks that still have inputs, in this order; a joined rank takes part in each:

    1 how many have inputs   all-reduce of ones (torch's Join)
    2 what follows           all-reduce of two flags: buffers before this forward? a reduction after it?
    3 buffers                from the highest rank that has inputs
    4 the reduction          zeros, and used-parameter counts of zero
"""

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm import World
from lockstep.parallel.averaging import Averaging
from lockstep.parallel.buffers import broadcast_model
from lockstep.reduce import TrainedModel


@final
class WrapperJoinHook(JoinHook):
    """Mirrors the collectives of a wrapper on a rank that has no inputs left."""

    def __init__(self, uneven: "UnevenInputs", sync_buffers: Callable[[int], None], *, sends_buffers: bool) -> None:
        super().__init__()
        self._uneven = uneven
        self._sync_buffers = sync_buffers
        self._sends_buffers = sends_buffers

    def main_hook(self) -> None:
        """Mirror one forward and backward of the others (collective)."""
        self._uneven.mirror_forward(self._sync_buffers)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final model (collective)."""
        self._uneven.end(is_last_joiner=is_last_joiner, sends_buffers=self._sends_buffers)


@final
class UnevenInputs:
    """A wrapper's part in `join`, on ranks with inputs and without."""

    def __init__(self, model: TrainedModel, world: World, averaging: Averaging, device: torch.device) -> None:
        assert world.group is not None
        self._model = model
        self._world = world
        self._group = world.group
        self._averaging = averaging
        self._device = device

    def begin(self, sync_buffers: Callable[[int], None], *, sends_buffers: bool) -> WrapperJoinHook:
        """Begin with `join`; return what a rank without inputs does (each rank calls)."""
        self._averaging.set_joining(True)
        return WrapperJoinHook(self, sync_buffers, sends_buffers=sends_buffers)

    def divide_by(self, num_ranks: int) -> None:
        """Let the next mean be over so many ranks (each rank calls)."""
        self._averaging.mean.divide_by(num_ranks)

    def begin_forward(self, *, sends_buffers: bool, reduces: bool) -> int | None:
        """Say to ranks without inputs what this forward does; return the rank whose buffers are sent (collective)."""
        self._exchange_forward(buffers=sends_buffers, reduction=reduces and self._averaging.reducer is not None)
        return self._highest_rank(is_candidate=True) if sends_buffers else None

    def mirror_forward(self, sync_buffers: Callable[[int], None]) -> None:
        """Take part in a forward and backward of the others without inputs (collective)."""
        buffers, reduction = self._exchange_forward(buffers=False, reduction=False)
        if buffers:
            sync_buffers(self._highest_rank(is_candidate=False))
        if reduction and self._averaging.reducer is not None:
            self._averaging.reducer.reduce_nothing()

    def end(self, *, is_last_joiner: bool, sends_buffers: bool) -> None:
        """Take the model of a rank that joined last (collective)."""
        source = self._highest_rank(is_candidate=is_last_joiner)
        broadcast_model(self._model, self._group, source, with_buffers=sends_buffers)
        self.divide_by(self._world.world_size)
        self._averaging.set_joining(False)

    def _exchange_forward(self, *, buffers: bool, reduction: bool) -> tuple[bool, bool]:
        """Return whether any rank sends buffers before this forward, and reduces after it (collective)."""
        flags = torch.tensor([float(buffers), float(reduction)], device=self._device)
        dist.all_reduce(flags, group=self._group)
        any_buffers, any_reduction = flags.tolist()
        return any_buffers > 0, any_reduction > 0

    def _highest_rank(self, *, is_candidate: bool) -> int:
        """Return the highest rank of the group that is a candidate (collective; at least one rank is)."""
        own = torch.tensor([self._group.rank() if is_candidate else -1], device=self._device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group)
        return int(own.item())
