"""A rank that skips a batch takes part in the backward of the others with nothing.

rank 0                          rank 1
------                          ------
forward                         forward: out of memory, the script goes on to the next batch
backward: its gradients    <->  zeros, and "empty" in the status: the mean is over the other ranks
optimizer.step()                optimizer.step(), by `take_missed_step`, or by the script after `skip_backward`
next forward                    next forward
"""

import weakref
from collections.abc import Iterable
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ReductionError
from lockstep.reduce import GroupStatus, Reducer


@final
class SkippedBatches:
    """Takes part in reductions without a backward of this rank; `is_empty` while that is with nothing."""

    def __init__(self, reducer: "weakref.ref[Reducer]") -> None:
        self._reducer = reducer
        self.is_empty = False

    def reduce_nothing(self) -> None:
        """Take part in a reduction with what was accumulated under `no_sync`, or with nothing (collective)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.watch.num_local_backwards:
            reducer.reduce_without_backward()
            return
        held = _detach_gradients(reducer)
        self.is_empty = True
        try:
            reducer.reduce_without_backward()
        finally:
            self.is_empty = False
            for parameter, gradient in held:
                if parameter.grad is None:  # no rank had one
                    parameter.grad = gradient

    def take_missed_step(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the step that the others take after this backward; `.grad` is as before then (collective)."""
        reducer = self._reducer()
        if reducer is None:
            return
        held = _detach_gradients(reducer)
        self.reduce_nothing()
        for optimizer in optimizers:
            optimizer.step()
        for parameter, gradient in held:
            parameter.grad = gradient

    def refuse_nothing_of_all(self, status: GroupStatus) -> None:
        if len(status.empty) == len(status.comparisons):
            raise ReductionError(
                "All ranks took part in a reduction with nothing. If a batch has several forwards before its backward, "
                'on_skip="zeros" cannot see which of them was skipped: call model.skip_backward() on the rank that '
                "skips. A batch that all ranks skip needs no call. (LS318)"
            )


def _detach_gradients(reducer: Reducer) -> list[tuple[nn.Parameter, Tensor | None]]:
    slots = [slot for bucket in reducer.buckets for slot in bucket.slots]
    return [(slot.parameter, slot.detach_gradient()) for slot in slots]
