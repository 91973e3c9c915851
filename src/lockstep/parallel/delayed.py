"""Parameters whose gradients are kept out of the buckets and reduced in one message, `delay_all_reduce_named_params`.

This is for embedding tables whose gradients are not complete before a certain point of the backward: they lie in one
buffer, which is reduced when the gradient of the parameter that the caller names arrives.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, broadcast_tensors
from lockstep.torch_private.autograd import queue_callback


def check_delayed(
    named: Iterable[tuple[str, nn.Parameter]] | None, trigger: Tensor | None
) -> list[tuple[str, nn.Parameter]]:
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time. (LS303)"
        )
    return list(named or ())


@final
class DelayedParameters:
    """Parameters of a module whose gradients are averaged when that of `trigger` arrives: after all of theirs.

    They are on one device and of one dtype.
    """

    def __init__(self, module: nn.Module, named: Mapping[str, nn.Parameter], trigger: Tensor, world: World) -> None:
        assert world.group is not None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = list(named)
        self._trigger_name = names.get(id(trigger), "")
        self._parameters = list(named.values())
        self._world = world
        first = self._parameters[0]
        sizes = [each.numel() for each in self._parameters]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self._buffer.split(sizes)
        self._places = [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]
        trigger.register_hook(self._reduce)

    @classmethod
    def of_names(cls, module: nn.Module, names: Sequence[str], trigger_name: str, world: World) -> Self:
        """Return those of a copied module, from `names_for_copy`."""
        named = dict(module.named_parameters())
        return cls(module, {name: named[name] for name in names}, named[trigger_name], world)

    def names_for_copy(self) -> tuple[list[str], str]:
        """Return what a copy of the module needs to delay the same parameters: their names, and that of the trigger."""
        if not self._trigger_name:
            raise RuntimeError(
                "This wrapper cannot be copied or saved: its param_to_hook_all_reduce is no parameter of the module, "
                "so a copy would not have it. Copy the module, and wrap the copy. (LS324)"
            )
        return self._names, self._trigger_name

    def move_to(self, world: World) -> None:
        """Average over the ranks of another group from now on (each rank calls)."""
        self._world = world

    def broadcast(self) -> None:
        """Overwrite the parameters with rank 0's (collective)."""
        assert self._world.group is not None
        broadcast_tensors(zip(self._names, self._parameters, strict=True), self._world.group)

    def prepare(self) -> None:
        """Let `.grad` of each parameter lie in the buffer; called before its backward."""
        if all(each.grad is None for each in self._parameters):
            self._buffer.zero_()
        for each, place in zip(self._parameters, self._places, strict=True):
            if each.grad is None:
                each.grad = place
                place.zero_()

    def _reduce(self, _gradient: Tensor) -> None:
        if not self._world.has_group:
            return
        self._buffer.div_(self._world.world_size)
        work = dist.all_reduce(self._buffer, group=self._world.group, async_op=True)
        assert work is not None
        queue_callback(work.wait)  # at the end of this backward
