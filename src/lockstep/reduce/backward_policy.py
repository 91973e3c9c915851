"""What becomes of backwards that are not reduced, and of a model that changes: it differs between the two owners.

Under `DistributedDataParallel` users accumulate gradients locally and change models between backwards, and both must be
reduced in the end. Under a trainer, gradients of a step that are not the last shard's are the trainer's partials, and a
model that changes in the middle of a step is an error.
"""

from typing import Protocol, final

from lockstep.comm import World
from lockstep.errors import ReductionError
from lockstep.reduce.buckets import AnySlot
from lockstep.reduce.current_plan import CurrentPlan
from lockstep.reduce.reduction import MeanReduction
from lockstep.reduce.status import GroupStatus


class BackwardPolicy(Protocol):
    @property
    def keeps_local(self) -> bool:
        """Whether gradients of a backward that is not reduced are kept for the next one that is."""

    def follow_change(self, status: GroupStatus, plan: CurrentPlan) -> None:
        """Follow a model that has changed on some ranks, or raise an error on every rank alike (collective)."""

    def take_local(self, slot: AnySlot) -> None:
        """Take in a gradient of a backward that is not reduced."""


@final
class KeepLocalGradients:
    """Keeps local gradients in their buckets, for `no_sync`, and plans anew for a model that has changed."""

    keeps_local = True

    def __init__(self, mean: MeanReduction) -> None:
        self._mean = mean

    def follow_change(self, status: GroupStatus, plan: CurrentPlan) -> None:  # noqa: ARG002
        plan.follow(self._mean.scale)

    def take_local(self, slot: AnySlot) -> None:
        slot.adopt()
        slot.is_unsynced = True


@final
class LeaveLocalGradients:
    """Leaves local gradients to the owner, and refuses a model that has changed."""

    keeps_local = False

    def __init__(self, world: World) -> None:
        self._world = world

    def follow_change(self, status: GroupStatus, plan: CurrentPlan) -> None:  # noqa: ARG002
        raise ReductionError(
            f"The parameters of the model were changed during a step on {len(status.changed)} of "
            f"{self._world.world_size} ranks, so these gradients are not whole. "
            "Change a model between steps only. (LS305)"
        )

    def take_local(self, slot: AnySlot) -> None:
        """Do nothing: the owner takes the gradient."""
