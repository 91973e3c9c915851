"""`ls.ShardedOptimizer`, for training loops with a wrapper."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lockstep.comm import current_world
from lockstep.comm.messages import joined_world
from lockstep.errors import LockstepError
from lockstep.sharding.parts import OptimizerParts


@final
class ShardedOptimizer(Optimizer):
    """An optimizer of which each rank holds a part of the state, and updates that part of the parameters.

        model = ls.DistributedDataParallel(model)
        optimizer = ls.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    For `torch.distributed.optim.ZeroRedundancyOptimizer`. The parameters have the bits that the whole optimizer would
    give them: a trial shows whether its class may have pieces of parameters, whole ones alone, or none left out (then
    it is refused). Gradients must be the same on all ranks, as a wrapper leaves them. Schedulers, `GradScaler` and
    clipping take it as any optimizer.

    Args:
        params: Parameters or groups of them, the same on every rank (constructing is local).
        optimizer_class: A class of `torch.optim`, or another one that keeps its state in `state[parameter]`.
        process_group: The ranks; None for the default group, or this process alone if there is none.
        defaults: Arguments of the class.

    Raises:
        ValueError: The optimizer cannot be shared; the message says why.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        process_group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self._is_made = False
        self._world = current_world() if process_group is None else joined_world(process_group)
        self.optim = optimizer_class(params, **defaults)
        """The optimizer that is shared, as torch calls it."""
        super().__init__(self.optim.param_groups, self.optim.defaults)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
        self._parts = OptimizerParts(self.optim, self._world, neighbours=0)
        self._is_made = True

    @property
    def num_state_bytes(self) -> int:
        """How many bytes of state this rank holds."""
        return self._parts.num_bytes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part of the parameters, and get the others from the other ranks (collective).

        Raises:
            GroupError: A rank is lost.
            UnusableStateError: The update of another rank has failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._parts.has_other_parameters:
            self._parts.settle(self._world)
        try:
            with self._parts.entered():
                self.optim.step()
        except BaseException:
            with suppress(LockstepError):  # the error here is the cause
                self._parts.gather(self._world, has_failed=True)
            raise
        self._parts.gather(self._world)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, the same on every rank (local; the next step shares the state anew)."""
        if self._is_made:
            self.optim.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Let rank `to` of the group, or with None each, have the whole state until the next step (collective)."""
        self._parts.collect(self._world, range(self._world.world_size) if to is None else [to])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, as its class does (local, after `consolidate_state_dict`).

        Raises:
            ValueError: This rank has a part of it alone.
        """
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a whole optimizer of this class, shared or not, and keep this rank's part (local)."""
        self.optim.load_state_dict(state_dict)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
