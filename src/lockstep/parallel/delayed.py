"""Parameters whose gradients are reduced by themselves, when a hook on one of them says so.

Embedding tables that are trained by another system are kept out of the buckets like this: their gradients lie in one
buffer of their own, which is reduced when the gradient of the parameter that the caller names arrives.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.torch_private import queue_callback


@final
class DelayedReduction:
    """The gradients of `parameters`, averaged when that of `trigger` arrives.

    Args:
        parameters: On one device, of one dtype.
        trigger: Whose gradient says that all of theirs are there; as a rule the parameter that is used first.
        world: The workers.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], trigger: Tensor, world: World) -> None:
        assert world.group is not None
        self._parameters = list(parameters)
        self._world = world
        first = self._parameters[0]
        self._buffer = torch.zeros(sum(each.numel() for each in parameters), dtype=first.dtype, device=first.device)
        parts = self._buffer.split([each.numel() for each in parameters])
        self._places = [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]
        trigger.register_hook(self._reduce)

    def prepare(self) -> None:
        """Let `.grad` of each parameter lie in the buffer; called before its backward."""
        if all(each.grad is None for each in self._parameters):
            self._buffer.zero_()
        for each, place in zip(self._parameters, self._places, strict=True):
            if each.grad is None:
                each.grad = place
                place.zero_()

    def _reduce(self, _gradient: Tensor) -> None:
        self._buffer.div_(self._world.world_size)
        work = dist.all_reduce(self._buffer, group=self._world.group, async_op=True)
        assert work is not None
        queue_callback(work.wait)  # at the end of this backward
