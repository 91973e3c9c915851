"""The reducer of a model, as its owner sees it: a wrapper, or a trainer.

What runs during a backward is in `lockstep.reduce.backward_reducer`; here is what an owner calls between backwards.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from lockstep.comm import World
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.recording import EventKind, own_recorder
from lockstep.reduce.backward_policy import BackwardPolicy
from lockstep.reduce.backward_reducer import BackwardReducer
from lockstep.reduce.backward_watch import Phase
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.current_plan import ReducerOptions
from lockstep.reduce.model import TrainedModel
from lockstep.reduce.reduction import BucketReduction
from lockstep.reduce.schedule import BackwardObserver, StepTimes
from lockstep.reduce.torch_reducer_names import TorchReducerNames


@final
class Reducer(TorchReducerNames):
    """Reduces the gradients of a model over a group in every backward that synchronises: as many on every rank."""

    def __init__(
        self,
        model: TrainedModel,
        world: World,
        options: ReducerOptions,
        reduction: BucketReduction,
        policy: BackwardPolicy,
    ) -> None:
        assert world.group is not None
        self.group = world.group
        self._backwards = BackwardReducer(model, world, options, reduction, policy)
        self.watch = self._backwards.watch
        self.schedule = self._backwards.schedule
        record_this_worker(world.rank, world.world_size)

    # -- Between two backwards -----------------------------------------------------------------------------------------

    def observe(self, observer: BackwardObserver) -> None:
        """Let somebody look at each backward, and have a part in the status (each rank calls)."""
        self.schedule.observer = observer

    def mark(self, *outputs: Tensor, num_samples: int = 0, on_reached: Callable[[], None] | None = None) -> None:
        """See `BackwardWatch.mark`; a backward is reduced if neither this call nor the backward is under `no_sync`."""
        self.watch.mark(outputs, num_samples, self._backwards, on_reached)

    def use_reduction(self, reduction: BucketReduction, *, only_gradients: bool) -> None:
        """Reduce buckets so from now on (each rank calls, with the same reduction)."""
        self.schedule.reduction = reduction
        if only_gradients:
            self._backwards.plan.use_only_gradients()
        self._backwards.renew()

    def finish_interrupted(self) -> None:
        """Complete the reduction of a backward that ended in an exception; called before a forward (collective)."""
        self.watch.finish_interrupted(self._backwards)

    def reduce_without_backward(self) -> None:
        """Take part in a reduction for which this rank ran no backward, with what `.grad` holds (collective)."""
        self.watch.begin_without_backward(self._backwards)
        self._backwards.complete()

    def reduce_nothing(self) -> None:
        """Take part in a reduction with zeros; `.grad` stays as it is (collective)."""
        gradients = [(slot.parameter, slot.detach_gradient()) for slot in self._backwards.plan.slots]
        try:
            self.reduce_without_backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def fail(self) -> None:
        """Take part in a reduction to which this rank has nothing to add, so that all get an error (collective)."""
        self._backwards.fail()

    def listen_last(self) -> None:
        """See each gradient after all other hooks that the parameters have by now (local; between two backwards)."""
        self._backwards.listen_last()

    def close(self) -> None:
        self._backwards.close()

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Record a wait of the owner's within, as those of a reduction are."""
        return own_recorder().during(EventKind.WAITING, -1, text=what)

    # -- What it has done ----------------------------------------------------------------------------------------------

    @property
    def num_reductions(self) -> int:
        return self._backwards.num_reductions

    @property
    def failed_on_all(self) -> bool:
        """Whether the last reduction ended in an error that every rank has, from the status of all."""
        return self._backwards.failed_on_all

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._backwards.buckets

    @property
    def is_idle(self) -> bool:
        """Whether no backward is under way or was left unfinished."""
        return self.watch.phase is Phase.IDLE

    @property
    def is_in_order(self) -> bool:
        """Whether buckets are in the order in which gradients arrive."""
        return self._backwards.plan.is_in_order

    @property
    def times(self) -> StepTimes:
        return self.schedule.times
