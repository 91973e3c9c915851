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
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import JoinHook


@final
class JoinCalls:
    """The collectives by which the ranks within `join` agree.

    Args:
        group: The wrapper's group.
        device: Where its messages lie.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def exchange_forward(self, *, buffers: bool, reduction: bool) -> tuple[bool, bool]:
        """Return whether any rank sends buffers before this forward, and reduces after it (collective)."""
        flags = torch.tensor([float(buffers), float(reduction)], device=self._device)
        dist.all_reduce(flags, group=self._group)
        any_buffers, any_reduction = flags.tolist()
        return any_buffers > 0, any_reduction > 0

    def highest_rank(self, *, is_candidate: bool) -> int:
        """Return the highest rank of the group that is a candidate (collective; at least one rank is)."""
        own = torch.tensor([self._group.rank() if is_candidate else -1], device=self._device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group)
        return int(own.item())


@final
class WrapperJoinHook(JoinHook):
    """Mirrors the collectives of a wrapper on a rank that has no inputs left.

    Args:
        calls: The ranks' agreement.
        sync_buffers: Overwrites the buffers with those of a rank (collective).
        reduce_nothing: Takes part in a reduction with zeros (collective); None without a reducer.
        sync_final_model: Takes the model of a rank that joined last; says whether this one did (collective).
    """

    def __init__(
        self,
        calls: JoinCalls,
        sync_buffers: Callable[[int], None],
        reduce_nothing: Callable[[], None] | None,
        sync_final_model: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._calls = calls
        self._sync_buffers = sync_buffers
        self._reduce_nothing = reduce_nothing
        self._sync_final_model = sync_final_model

    def main_hook(self) -> None:
        """Mirror one forward and backward of the others (collective)."""
        buffers, reduction = self._calls.exchange_forward(buffers=False, reduction=False)
        if buffers:
            self._sync_buffers(self._calls.highest_rank(is_candidate=False))
        if reduction and self._reduce_nothing is not None:
            self._reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final model (collective)."""
        self._sync_final_model(is_last_joiner)
