"""From a plan to buffers: the buckets of a model, and where used-parameter counts and status trailer are written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import allocate_buffer
from lockstep.reduce.buckets import DenseBucket
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.plan import ReductionPlan
from lockstep.reduce.slot import Slot
from lockstep.reduce.sparse_bucket import SparseBucket, SparseSlot
from lockstep.reduce.status_message import read_numbers
from lockstep.reduce.streams import BackwardStreams, make_streams

Bucket = DenseBucket | SparseBucket
AnySlot = Slot | SparseSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSet:
    """The buckets of a plan, at work."""

    buckets: tuple[Bucket, ...]
    """In the order in which they are sent."""
    trailer: Tensor
    """The part of the last message where the status is written and read; empty if it is not sent with it."""
    extra_message: Tensor | None
    """Counts and trailer, if they have a message of their own, after that of the last bucket."""
    streams: tuple[BackwardStreams, ...] = ()
    """Those of each device that has streams and buckets."""


def no_buckets() -> BucketSet:
    return BucketSet(buckets=(), trailer=torch.zeros(0), extra_message=None)


def allocate_buckets(
    plan: ReductionPlan,
    trained: Sequence[TrainedParameter],
    group: ProcessGroup,
    *,
    as_view: bool,
    holds_partials: bool = False,
) -> BucketSet:
    """Allocate the buckets of a plan (local)."""
    num_slots = sum(len(bucket.slots) for bucket in plan.buckets)
    extra = None
    if plan.has_extra_message:
        extra = torch.zeros(num_slots + plan.trailer_length, device=plan.buckets[0].device)
    streams = {device: make_streams(device) for device in {bucket.device for bucket in plan.buckets}}
    buckets: list[Bucket] = []
    offset = 0
    buffer = None
    for bucket in plan.buckets:
        allocate = partial(_allocate, bucket.num_elements, bucket.dtype, bucket.device, group)
        if not bucket.is_sparse:
            buffer = allocate()
        if extra is not None:
            used_counts = extra[offset : offset + len(bucket.slots)]
        else:
            assert buffer is not None
            used_counts = buffer[bucket.num_gradient_elements :][: len(bucket.slots)]
        offset += len(bucket.slots)
        if bucket.is_sparse:
            only = trained[bucket.slots[0].parameter]
            buckets.append(SparseBucket(only.spec.name, only.parameter, used_counts, streams[bucket.device]))
        else:
            assert buffer is not None
            buckets.append(
                DenseBucket(
                    bucket,
                    trained,
                    buffer,
                    used_counts,
                    as_view=as_view,
                    allocate=allocate,
                    streams=streams[bucket.device],
                    holds_partials=holds_partials,
                )
            )
    last = extra if extra is not None else buffer
    assert last is not None
    trailer = last[last.numel() - plan.trailer_length :]
    for each in buckets:
        if isinstance(each, DenseBucket):
            each.count_holders(trailer)
    return BucketSet(
        buckets=tuple(buckets),
        trailer=trailer,
        extra_message=extra,
        streams=tuple(each for each in streams.values() if each is not None),
    )


def read_used_counts(buckets: Sequence[Bucket], needed: Iterable[int]) -> list[Sequence[float]]:
    """Return how many ranks had each gradient, for the buckets with the numbers in `needed`; for others nothing.

    Where the buckets lie on an asynchronous device this waits for it: once for all of them.
    """
    found: list[Sequence[float]] = [()] * len(buckets)
    on_device = []
    for number in needed:
        if buckets[number].used_counts.device.type == "cpu":
            found[number] = read_numbers(buckets[number].used_counts)
        else:
            on_device.append(number)
    if on_device:
        home = buckets[on_device[0]].used_counts.device
        numbers = read_numbers(
            torch.cat([_as_real(buckets[number].used_counts).to(home, torch.float32) for number in on_device])
        )
        for number in on_device:
            num_slots = len(buckets[number].slots)
            found[number], numbers = numbers[:num_slots], numbers[num_slots:]
    return found


def _as_real(numbers: Tensor) -> Tensor:
    return torch.view_as_real(numbers)[:, 0] if numbers.is_complex() else numbers


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a buffer that is no view of another tensor, which would keep its memory even when the buffer moves."""
    with torch.no_grad():
        buffer = allocate_buffer(num_elements, dtype, device, group)
        return torch.empty(0, dtype=dtype, device=device).set_(buffer)  # type: ignore[call-overload,no-any-return]
