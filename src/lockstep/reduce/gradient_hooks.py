"""Hooks on parameters: each gradient that is accumulated is counted, goes to its bucket, stays local, or is an error.

This is what each gradient of each step costs. [Note: plain arrivals] in `lockstep.reduce.backward_watch`.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.errors import ReductionError
from lockstep.reduce.backward_watch import BackwardListener, BackwardWatch, Phase
from lockstep.reduce.buckets import AnySlot, Bucket
from lockstep.reduce.current_plan import CurrentPlan
from lockstep.reduce.schedule import BucketSchedule
from lockstep.reduce.slot import PlainArrivals, Slot
from lockstep.torch_private.autograd import current_graph_task_id
from lockstep.torch_private.compiler import keep_compiler_out

_NUM_WATCHED = 32
"""Of so many parameters is seen whether `torch.autograd.grad` asks for their gradients; each costs a call."""


@final
class GradientHooks:
    """The hooks of one reducer; they go when it does, so that the model can be wrapped anew. They hold it weakly."""

    def __init__(
        self,
        watch: BackwardWatch,
        plan: CurrentPlan,
        schedule: BucketSchedule,
        listener: BackwardListener,
        *,
        keeps_local: bool,
    ) -> None:
        self._watch = watch
        self._plan = plan
        self.schedule = schedule
        self._listener = weakref.ref(listener)
        self._keeps_local = keeps_local
        self._handles: list[RemovableHandle] = []
        self._frozen: list[tuple[AnySlot, Bucket]] = []
        self._plain: PlainArrivals | None = None
        weakref.finalize(self, _remove, self._handles)

    def listen(self, buckets: Sequence[Bucket], kept: Bucket | None) -> None:
        """See the gradients of these buckets only, after all other hooks that their parameters have by now."""
        self.remove()
        if kept is not None and kept.streams is None:
            small = [slot for slot in kept.slots if isinstance(slot, Slot) and slot.is_small]
            self._plain = PlainArrivals(small, partial(_deliver, self._watch, weakref.ref(self), kept))
        self._watch.use_switch(self._plain)
        self._listen([(slot, bucket) for bucket in buckets for slot in bucket.slots])

    def listen_unfrozen(self) -> None:
        """See those that were frozen at `listen`, without hooks, and are not any more, as a critic's in a GAN."""
        if self._frozen:
            self._listen(self._frozen)

    def listen_unplanned(self, parameters: Iterable[nn.Parameter]) -> None:
        hook = partial(_deliver_unplanned, self._watch, self._listener)
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def remove(self) -> None:
        _remove(self._handles)
        self._frozen, self._plain = [], None

    # -- What becomes of a gradient ------------------------------------------------------------------------------------

    def take(self, slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
        watch, listener = self._watch, self._listener()
        if listener is None:
            return
        if watch.arrive(listener):
            slot, bucket = self._plan.slot_of(parameter)  # there may be new buckets now
        if not slot.fits:
            return  # [Note: a changed model]
        if watch.phase is Phase.ACCUMULATING:
            self._take_local(slot)
            return
        if slot.has_arrived:
            self._take_second(slot, bucket)
            return
        if not slot.is_small:
            slot.take(1.0 if watch.waits_for_end else self.schedule.reduction.scale)
        if self._plan.wants_order:
            self._plan.arrived.append(slot)
        elif not self._plan.has_changed and not watch.waits_for_end:
            watch.call_plain()
        slot.has_arrived = True
        bucket.num_pending -= 1
        if bucket.num_pending == 0 and not watch.waits_for_end:
            self.schedule.send_full()

    def _take_local(self, slot: AnySlot) -> None:
        """Take a gradient of a backward that is not reduced; a trainer takes it itself."""
        if self._keeps_local:
            slot.adopt()
            slot.is_unsynced = True

    def _take_second(self, slot: AnySlot, bucket: Bucket) -> None:
        self._watch.note_second_gradient()
        if slot.is_scaled or self.schedule.was_sent(bucket):
            raise ReductionError(
                f"Parameter {slot.name} got a second gradient in one backward after its first had been sent. This "
                "happens when a model begins to use a parameter inside a reentrant checkpoint and elsewhere after its "
                "first step. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False). (LS307)"
            )
        slot.take_second()

    def _listen(self, places: Sequence[tuple[AnySlot, Bucket]]) -> None:
        own = weakref.ref(self)
        self._frozen = [(slot, bucket) for slot, bucket in places if not slot.parameter.requires_grad]
        places = [(slot, bucket) for slot, bucket in places if slot.parameter.requires_grad]
        for slot, bucket in places:
            if self._plain is not None and self._plain.has(slot):
                hook = self._plain.hook
            else:
                hook = partial(_deliver, self._watch, own, bucket, slot)
            self._handles.append(slot.parameter.register_post_accumulate_grad_hook(hook))
        for slot, _ in places[:_NUM_WATCHED]:
            self._handles.append(slot.parameter.register_hook(partial(_note_asked, self._watch)))


@keep_compiler_out
def _deliver(
    watch: BackwardWatch,
    hooks: "weakref.ref[GradientHooks]",
    bucket: Bucket,
    slot: AnySlot,
    parameter: nn.Parameter,
) -> None:
    if bucket.streams is not None:
        bucket.streams.note_current()
    alive = hooks()
    if alive is None:
        return
    if slot.has_arrived or current_graph_task_id() != watch.plain_task:
        alive.take(slot, bucket, parameter)
        return
    # [Note: plain arrivals]
    if not slot.is_small:
        slot.take(alive.schedule.reduction.scale)
    slot.has_arrived = True
    bucket.num_pending -= 1
    if bucket.num_pending == 0:
        alive.schedule.send_full()


@keep_compiler_out
def _deliver_unplanned(
    watch: BackwardWatch, listener: "weakref.ref[BackwardListener]", _parameter: nn.Parameter
) -> None:
    alive = listener()
    if alive is not None:
        watch.arrive(alive)


@keep_compiler_out
def _note_asked(watch: BackwardWatch, _gradient: Tensor) -> None:
    # Gradients that are differentiated again (`create_graph=True`) become part of a loss, whose backward is reduced.
    watch.was_asked |= not torch.is_grad_enabled()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
