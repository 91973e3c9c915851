"""Hooks on parameters: each gradient that is accumulated is counted, or goes to its bucket.

This is what each gradient of each step costs. [Note: plain arrivals] in `lockstep.reduce.backward_watch`.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.reduce.backward_watch import BackwardWatch
from lockstep.reduce.buckets import AnySlot, Bucket
from lockstep.reduce.plain_arrivals import PlainArrivals
from lockstep.reduce.slot import Slot
from lockstep.torch_private.autograd import current_graph_task_id
from lockstep.torch_private.compiler import keep_compiler_out

_NUM_WATCHED = 32
"""Of so many parameters is seen whether `torch.autograd.grad` asks for their gradients; each costs a call."""


class GradientReceiver(Protocol):
    """Takes what is not only counted."""

    def take(self, slot: AnySlot, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Take in a gradient that was just accumulated."""

    def take_unplanned(self) -> None:
        """Take in a gradient of a parameter that has no slot yet."""

    def send_full(self) -> None:
        """Send what can be sent: a bucket has become full."""


@final
class GradientHooks:
    """The hooks of one reducer; they go when it does, so that the model can be wrapped anew. They hold it weakly."""

    def __init__(self, watch: BackwardWatch, receiver: GradientReceiver) -> None:
        self._watch = watch
        self._receiver = weakref.ref(receiver)
        self._handles: list[RemovableHandle] = []
        self._frozen: list[tuple[AnySlot, Bucket]] = []
        self._plain: PlainArrivals | None = None
        weakref.finalize(self, _remove, self._handles)

    def listen(self, buckets: Sequence[Bucket], kept: Bucket | None) -> None:
        """See the gradients of these buckets only, after all other hooks that their parameters have by now."""
        self.remove()
        if kept is not None and kept.streams is None:
            small = [slot for slot in kept.slots if isinstance(slot, Slot) and slot.is_small]
            self._plain = PlainArrivals(small, partial(_deliver, self._watch, self._receiver, kept))
        self._watch.use_switch(self._plain)
        self._listen([(slot, bucket) for bucket in buckets for slot in bucket.slots])

    def listen_unfrozen(self) -> None:
        """See those that were frozen, and had no hooks, when `listen` was called, and are not any more.

        As those of a critic that is frozen while its generator trains, if its buckets get their order at that moment.
        """
        if self._frozen:
            self._listen(self._frozen)

    def listen_unplanned(self, parameters: Iterable[nn.Parameter]) -> None:
        hook = partial(_deliver_unplanned, self._receiver)
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def remove(self) -> None:
        _remove(self._handles)
        self._frozen, self._plain = [], None

    def _listen(self, places: Sequence[tuple[AnySlot, Bucket]]) -> None:
        self._frozen = [(slot, bucket) for slot, bucket in places if not slot.parameter.requires_grad]
        places = [(slot, bucket) for slot, bucket in places if slot.parameter.requires_grad]
        for slot, bucket in places:
            if self._plain is not None and self._plain.has(slot):
                hook = self._plain.hook
            else:
                deliver = _deliver if bucket.streams is None else _deliver_on_stream
                hook = partial(deliver, self._watch, self._receiver, bucket, slot)
            self._handles.append(slot.parameter.register_post_accumulate_grad_hook(hook))
        for slot, _ in places[:_NUM_WATCHED]:
            self._handles.append(slot.parameter.register_hook(partial(_note_asked, self._watch)))


@keep_compiler_out
def _deliver(
    watch: BackwardWatch,
    receiver: "weakref.ref[GradientReceiver]",
    bucket: Bucket,
    slot: AnySlot,
    parameter: nn.Parameter,
) -> None:
    if slot.is_small and not slot.has_arrived and current_graph_task_id() == watch.plain_task:
        slot.has_arrived = True  # [Note: plain arrivals]
        bucket.num_pending -= 1
        if bucket.num_pending:
            return
        alive = receiver()
        if alive is not None:
            alive.send_full()
        return
    alive = receiver()
    if alive is not None:
        alive.take(slot, bucket, parameter)


@keep_compiler_out
def _deliver_on_stream(
    watch: BackwardWatch,
    receiver: "weakref.ref[GradientReceiver]",
    bucket: Bucket,
    slot: AnySlot,
    parameter: nn.Parameter,
) -> None:
    if bucket.streams is not None:
        bucket.streams.note_current()
    _deliver(watch, receiver, bucket, slot, parameter)


@keep_compiler_out
def _deliver_unplanned(receiver: "weakref.ref[GradientReceiver]", _parameter: nn.Parameter) -> None:
    alive = receiver()
    if alive is not None:
        alive.take_unplanned()


@keep_compiler_out
def _note_asked(watch: BackwardWatch, _gradient: Tensor) -> None:
    # Gradients that are differentiated again (`create_graph=True`) become part of a loss, whose backward is reduced.
    watch.was_asked |= not torch.is_grad_enabled()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
