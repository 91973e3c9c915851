"""Training with uneven inputs: what a rank that has run out of them does until the others are done.

Per forward of the ranks that go on, in this order; a joined rank takes part in each:

    1 who goes on          all-reduce of ones (torch's Join)
    2 what comes           all-reduce of two flags: buffers before this forward? a reduction after it?
    3 buffers              from the highest rank that goes on
    4 the reduction        zeros, and a presence of nothing
"""

from typing import Protocol, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import JoinHook


class Joined(Protocol):
    """What a joined rank asks of its wrapper."""

    def shadow_forward(self) -> bool:
        """Take part in what the others do before a forward; return whether a reduction follows (collective)."""

    def shadow_backward(self) -> None:
        """Take part in their reduction (collective)."""

    def take_final_model(self, *, is_last_joiner: bool) -> None:
        """Take the model of a rank that joined last (collective)."""


@final
class WrapperJoinHook(JoinHook):
    """Mirrors the collectives of a wrapper."""

    def __init__(self, wrapper: Joined) -> None:
        super().__init__()
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Mirror one forward and backward of the others."""
        if self._wrapper.shadow_forward():
            self._wrapper.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final model."""
        self._wrapper.take_final_model(is_last_joiner=is_last_joiner)


def tell_what_comes(group: ProcessGroup, device: torch.device, *, buffers: bool, reduction: bool) -> tuple[bool, bool]:
    """Return whether any rank wants buffers now and a reduction after (collective)."""
    flags = torch.tensor([float(buffers), float(reduction)], device=device)
    dist.all_reduce(flags, group=group)
    wants_buffers, wants_reduction = flags.tolist()
    return wants_buffers > 0, wants_reduction > 0


def highest_rank(group: ProcessGroup, device: torch.device, *, is_candidate: bool) -> int:
    """Return the highest rank of the group that is a candidate (collective; one is)."""
    mine = torch.tensor([group.rank() if is_candidate else -1], device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return int(mine.item())
