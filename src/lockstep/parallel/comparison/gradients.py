"""The reduced gradients, from the end of a reduction to the optimizer's step and on to the next backward.

A reduction leaves the same gradients on all ranks. If nobody writes to them before the optimizer steps, nothing has to
be read. Who writes to them all, as clipping does, writes to the few that are looked at here. Buckets that are small are
read in any case: that shows a write to one gradient alone, and one through `.data`.
"""

import weakref
from collections.abc import Sequence
from typing import final

from torch import nn

from lockstep.reduce import Reducer
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.tensor_bits import glance_at_bits
from lockstep.torch_private.modules import version_of

_NUM_SEEN = 8
"""Gradients that are looked at in each step, others each time."""
_SMALL_BYTES = 1 << 18
"""Buckets up to this size are read in each step."""


@final
class StepGradients:
    def __init__(self, reducer: "weakref.ref[Reducer]", *, may_read: bool) -> None:
        self._reducer = reducer
        self._may_read = may_read
        self._turn = 0
        self._seen: list[tuple[nn.Parameter, int, int]] = []
        self._first: tuple[nn.Parameter, int, int] | None = None

    def note_reduced(self) -> None:
        reducer = self._reducer()
        if reducer is None:
            return
        buckets = reducer.buckets
        number = sum(len(bucket.slots) for bucket in buckets)
        self._turn += 1
        chosen = {0, number - 1, *(self._turn * _NUM_SEEN + index for index in range(_NUM_SEEN))}
        self._seen = [_look(_parameter_at(buckets, index % number)) for index in chosen] if number else []
        self._first = self._seen[0] if self._seen else None

    def forget(self) -> None:
        self._seen, self._first = [], None

    def note_step(self) -> None:
        if self._first is not None:
            self._first = _look(self._first[0])

    def number(self) -> int:
        """Return a number for what the optimizer is given; 0 if that is what the reduction has left (local)."""
        now = [_look(parameter) for parameter, _, _ in self._seen]
        was_written = now != self._seen
        reducer = self._reducer()
        if reducer is None or not self._may_read:
            return 0
        messages = [bucket.message for bucket in reducer.buckets if not bucket.message.is_sparse]
        if not was_written and sum(message.nbytes for message in messages) > _SMALL_BYTES:
            return 0
        moved = [
            parameter.grad for (parameter, key, _), (_, before, _) in zip(now, self._seen, strict=True) if key != before
        ]
        there = [each for each in moved if each is not None]
        return hash((glance_at_bits(*messages, *there), *(each is None for each in moved)))

    def are_kept(self) -> bool:
        """Return whether `.grad` holds what the last reduction or step has left (local)."""
        return self._first is not None and self._first[1] != 0 and _look(self._first[0]) == self._first


def _parameter_at(buckets: Sequence[Bucket], index: int) -> nn.Parameter:
    number = 0
    while index >= len(buckets[number].slots):
        index -= len(buckets[number].slots)
        number += 1
    return buckets[number].slots[index].parameter


def _look(parameter: nn.Parameter) -> tuple[nn.Parameter, int, int]:
    """Return what shows that a gradient was replaced or written to. A reference to it would count as a holder's."""
    gradient = parameter.grad
    return (parameter, 0, 0) if gradient is None else (parameter, id(gradient), version_of(gradient))


def has_unsynchronized(reducer: Reducer, parameters: Sequence[nn.Parameter]) -> str:
    """Return the name of a parameter whose gradient was accumulated and not reduced; empty if there is none."""
    chosen = set(map(id, parameters))
    slots = (slot for bucket in reducer.buckets for slot in bucket.slots if id(slot.parameter) in chosen)
    return next((slot.name for slot in slots if slot.is_unsynced and slot.parameter.grad is not None), "")
