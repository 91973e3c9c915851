"""From a plan to buffers: the buckets of a model, and where presence and notes are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import allocate_buffer
from lockstep.reduce.bucket import DenseBucket, Slot
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.plan import Plan
from lockstep.reduce.sparse_bucket import SparseBucket, SparseSlot

Bucket = DenseBucket | SparseBucket
AnySlot = Slot | SparseSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The buckets of a plan, at work."""

    buckets: tuple[Bucket, ...]
    """In the order in which they travel."""
    notes: Tensor
    """Where this rank's notes are written and those of all ranks are read; a part of the last message."""
    last_message: Tensor | None
    """Presence and notes, if they have a message of their own, after that of the last bucket."""


def empty_layout() -> Layout:
    """Return one without buckets."""
    return Layout(buckets=(), notes=torch.zeros(0), last_message=None)


def lay_out(
    plan: Plan, trained: Sequence[TrainedParameter], group: ProcessGroup, *, as_view: bool, of_shards: bool = False
) -> Layout:
    """Allocate the buckets of a plan (local).

    Args:
        plan: The plan.
        trained: The parameters that it was made for.
        group: The group that will reduce them, which may have memory of its own for that.
        as_view: Whether `.grad` should be a view, as torch understands it.
        of_shards: Whether ranks run several shards each; see `DenseBucket`.
    """
    num_slots = sum(len(bucket.slots) for bucket in plan.buckets)
    extra = None
    if not plan.notes_ride:
        extra = torch.zeros(num_slots + plan.num_notes, device=plan.buckets[0].device)
    buckets: list[Bucket] = []
    offset = 0
    buffer = None
    for bucket in plan.buckets:
        allocate = partial(_allocate, bucket.num_elements, bucket.dtype, bucket.device, group)
        if not bucket.is_sparse:
            buffer = allocate()
        if extra is not None:
            presence = extra[offset : offset + len(bucket.slots)]
        else:
            assert buffer is not None
            presence = buffer[bucket.num_gradient_elements :][: len(bucket.slots)]
        offset += len(bucket.slots)
        if bucket.is_sparse:
            only = trained[bucket.slots[0].parameter]
            buckets.append(SparseBucket(only.spec.name, only.parameter, presence))
        else:
            assert buffer is not None
            buckets.append(
                DenseBucket(
                    bucket,
                    trained,
                    buffer,
                    presence,
                    as_view=as_view,
                    allocate=allocate,
                    of_shards=of_shards,
                )
            )
    if extra is not None:
        notes = extra[num_slots:]
    else:
        assert buffer is not None
        notes = buffer[buffer.numel() - plan.num_notes :]
    for each in buckets:
        if isinstance(each, DenseBucket):
            each.count_holders(notes)
    return Layout(buckets=tuple(buckets), notes=notes, last_message=extra)


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a buffer that is no view of another tensor, which would keep its memory even when the buffer moves."""
    with torch.no_grad():
        buffer = allocate_buffer(num_elements, dtype, device, group)
        return torch.empty(0, dtype=dtype, device=device).set_(buffer)  # type: ignore[call-overload,no-any-return]
