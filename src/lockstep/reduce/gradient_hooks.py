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

from lockstep.compiler import keep_compiler_out
from lockstep.reduce.backward_watch import BackwardWatch
from lockstep.reduce.bucket_set import AnySlot, Bucket
from lockstep.torch_private import current_graph_task_id

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
    """The hooks of one reducer; they go when it does, so that the model can be wrapped anew.

    Args:
        watch: Watches the backwards; the hooks hold it.
        receiver: Where gradients go; the hooks hold it weakly.
    """

    def __init__(self, watch: BackwardWatch, receiver: GradientReceiver) -> None:
        self._watch = watch
        self._receiver = weakref.ref(receiver)
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def listen(self, buckets: Sequence[Bucket]) -> None:
        """See the gradients of these buckets only, after all other hooks that their parameters have by now."""
        self.remove()
        places = [(slot, bucket) for bucket in buckets for slot in bucket.slots if slot.parameter.requires_grad]
        for slot, bucket in places:
            deliver = _deliver if bucket.streams is None else _deliver_on_stream
            hook = partial(deliver, self._watch, self._receiver, slot, bucket)
            self._handles.append(slot.parameter.register_post_accumulate_grad_hook(hook))
        for slot, _ in places[:_NUM_WATCHED]:
            self._handles.append(slot.parameter.register_hook(partial(_note_asked, self._watch)))

    def listen_unplanned(self, parameters: Iterable[nn.Parameter]) -> None:
        """See the gradients of parameters that have no slot yet, as well."""
        hook = partial(_deliver_unplanned, self._receiver)
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def remove(self) -> None:
        """See no gradients any more."""
        _remove(self._handles)


@keep_compiler_out
def _deliver(
    watch: BackwardWatch,
    receiver: "weakref.ref[GradientReceiver]",
    slot: AnySlot,
    bucket: Bucket,
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
    slot: AnySlot,
    bucket: Bucket,
    parameter: nn.Parameter,
) -> None:
    if bucket.streams is not None:
        bucket.streams.note_current()
    _deliver(watch, receiver, slot, bucket, parameter)


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
