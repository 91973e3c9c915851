"""What becomes of a gradient that has arrived: it goes to its bucket, stays local, or is an error.

Each gradient that is not only counted is passed to it ([Note: plain arrivals] in `lockstep.reduce.backward_watch`).
"""

import weakref
from typing import final

from torch import nn

from lockstep.errors import ReductionError
from lockstep.reduce.backward_policy import BackwardPolicy
from lockstep.reduce.backward_watch import BackwardListener, BackwardWatch, Phase
from lockstep.reduce.buckets import AnySlot, Bucket
from lockstep.reduce.current_plan import CurrentPlan
from lockstep.reduce.schedule import BucketSchedule


@final
class GradientIntake:
    """Takes in the gradients of one model (a `GradientReceiver`)."""

    def __init__(
        self,
        watch: BackwardWatch,
        plan: CurrentPlan,
        schedule: BucketSchedule,
        policy: BackwardPolicy,
        listener: BackwardListener,
    ) -> None:
        self._watch = watch
        self._plan = plan
        self._schedule = schedule
        self._policy = policy
        self._listener = weakref.ref(listener)

    def take(self, slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
        watch, listener = self._watch, self._listener()
        if listener is None:
            return
        if watch.arrive(listener):
            slot, bucket = self._plan.slot_of(parameter)  # there may be new buckets now
        if not slot.fits:
            return  # [Note: a changed model]
        if watch.phase is Phase.ACCUMULATING:
            self._policy.take_local(slot)
            return
        if slot.has_arrived:
            self._take_second(slot, bucket)
            return
        if not slot.is_small:
            slot.take(1.0 if watch.waits_for_end else self._schedule.reduction.scale)
        if self._plan.wants_order:
            self._plan.note_arrival(slot)
        elif not self._plan.has_changed and not watch.waits_for_end:
            watch.call_plain()
        slot.has_arrived = True
        bucket.num_pending -= 1
        if bucket.num_pending == 0 and not watch.waits_for_end:
            self._schedule.send_full()

    def take_unplanned(self) -> None:
        listener = self._listener()
        if listener is not None:
            self._watch.arrive(listener)

    def send_full(self) -> None:
        self._schedule.send_full()

    def _take_second(self, slot: AnySlot, bucket: Bucket) -> None:
        self._watch.note_second_gradient()
        if slot.is_scaled or self._schedule.was_sent(bucket):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward after its first had been sent. This "
                "happens when a model begins to use a parameter inside a reentrant checkpoint and elsewhere after its "
                "first step. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False). (LS307)"
            )
        slot.take_second()
