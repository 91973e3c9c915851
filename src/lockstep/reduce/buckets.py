"""The buckets of a model at work: their buffers, the places that become `.grad`, and what has arrived."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lockstep.comm import allocate_buffer
from lockstep.errors import ReductionError
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.partials import Gradients, Partials, add_each, add_zero
from lockstep.reduce.plan import BucketPlan, ReductionPlan
from lockstep.reduce.slot import BackwardStreams, Slot, make_streams, make_view
from lockstep.reduce.status import read_numbers
from lockstep.reduce.tensor_bits import is_finite, multiply_in_place
from lockstep.torch_private.modules import (
    REFERENCES_OF_ONE_HOLDER,
    foreach_copy_,
    foreach_mul_,
    storage_address,
    storage_use_count,
)

_GRADIENT = attrgetter("grad")
_PARAMETER = attrgetter("parameter")
_PLACE = attrgetter("place")
_IS_SPARSE = attrgetter("is_sparse")
_HAS_ARRIVED = attrgetter("has_arrived")
_IS_SCALED = attrgetter("is_scaled")


@final
class DenseBucket:
    """A flat buffer with the gradients of several parameters.

        backward begins    `begin`           what others hold keeps its memory; what lies in other memory is noted
        arrival            `Slot.take`       a large gradient goes to its place at once, scaled on the way
        bucket is full     `prepare`         the small ones go together; what is absent is filled in; the rest is scaled
        message is back    `write_back`      `.grad` is the place, which now holds the reduced gradient

    `message` is what is added up over the ranks, `gradients` the part of it that a communication hook is given.
    `absent` has the indices of slots without a new gradient here; `unused`, of those to which this rank adds nothing,
    not even an older one. `used_counts` is written before a reduction and read after it. `allocate` returns zeros.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[TrainedParameter],
        buffer: Tensor,
        used_counts: Tensor,
        *,
        as_view: bool,
        allocate: Callable[[], Tensor],
        streams: BackwardStreams | None = None,
        holds_partials: bool = False,
    ) -> None:
        self.streams = streams
        self.message = buffer
        self.gradients = buffer[: plan.num_gradient_elements]
        self.used_counts = used_counts
        self.slots = []
        for slot in plan.slots:
            trained = parameters[slot.parameter]
            flat = buffer[slot.offset : slot.offset + trained.spec.num_elements]
            self.slots.append(Slot(trained.spec, trained.parameter, flat, as_view=as_view, takes_sparse=holds_partials))
        self._offsets = [slot.offset for slot in plan.slots]
        self._parameters = [slot.parameter for slot in self.slots]
        self._as_view = as_view
        self._holds_partials = holds_partials
        self._allocate = allocate
        self._parts = [buffer, self.gradients, used_counts, *(slot.flat for slot in self.slots)]
        self._storage = buffer.untyped_storage()
        self._num_holders = 0
        self._addresses = [slot.place.data_ptr() for slot in self.slots]
        self._elsewhere: list[Slot] = []
        self._is_finite: bool | None = None
        """Whether the gradients that the message holds are, where they were multiplied; None elsewhere."""
        self.absent: list[int] = []
        self.unused: list[int] = []
        self.num_pending = len(self.slots)

    def count_holders(self, trailer: Tensor) -> None:
        """Count how many tensors of ours lie in the bucket's memory; called when all do."""
        self._parts.append(trailer)
        self._num_holders = storage_use_count(storage_address(self._storage))

    def begin(self) -> None:
        if list(map(Tensor.data_ptr, map(_PLACE, self.slots))) != self._addresses:
            for slot in self.slots:
                if not slot.is_in_bucket:
                    slot.renew_place()
        if self._as_view:
            return
        if storage_use_count(storage_address(self._storage)) > self._num_holders:
            self._keep_held()
        if self._holds_partials or all(map(is_, map(_GRADIENT, self._parameters), repeat(None))):
            return
        self._elsewhere += [slot for slot in self.slots if slot.find_in_other_memory()]

    def prepare(self, scale: float) -> None:
        """Make the message ready; `scale` what is not scaled already."""
        if self.streams is not None:
            self.streams.join()
        self._adopt_small()
        self.absent = self._find_absent()
        for index in self.absent:
            self.slots[index].fill_absent()
        self.count_used()
        self._is_finite = None
        if scale == 1.0:
            return
        are_some_scaled = any(map(_IS_SCALED, self.slots))
        unscaled = [slot.flat for slot in self.slots if not slot.is_scaled] if are_some_scaled else [self.gradients]
        if self.gradients.is_cpu:
            self._is_finite = all(slot.is_finite for slot in self.slots if slot.is_scaled)
            if unscaled:
                self._is_finite &= multiply_in_place(unscaled, scale)
        elif unscaled:
            foreach_mul_(unscaled, scale)

    def name_nonfinite(self) -> str:
        """Return the name of a gradient in the message, on the CPU, that is not finite; empty if all are (local)."""
        if is_finite(self.gradients) if self._is_finite is None else self._is_finite:
            return ""
        return next((slot.name for slot in self.slots if not is_finite(slot.place)), "")

    def prepare_nothing(self) -> None:
        """Make a message of zeros ready, for a backward that has failed here.

        What `.grad` holds may be lost, as it is not usable after a failure. What others hold is kept if there is memory
        for it; if there is none, the message goes first, because the other ranks wait for it.
        """
        if self.streams is not None:
            self.streams.join()
        for slot in self.slots:
            with suppress(torch.OutOfMemoryError):
                slot.keep_held_by_others()
        with torch.no_grad():
            self.gradients.zero_()
        self.count_nothing()

    def count_used(self) -> None:
        """Write down which parameters have a gradient here. [Note: used-parameter counts] in `lockstep.reduce.plan`."""
        self.absent = self._find_absent()
        self.unused = []
        self.used_counts.fill_(1)
        for index in self.absent:
            slot = self.slots[index]
            # What was accumulated under no_sync counts as had, unless it was cleared since.
            slot.is_unsynced = slot.is_unsynced and slot.fits and slot.parameter.grad is not None
            if not slot.is_unsynced and not (self._holds_partials and slot.kept is not None):
                self.unused.append(index)
                self.used_counts[index] = 0

    def count_nothing(self) -> None:
        self.absent = self.unused = list(range(len(self.slots)))
        self.used_counts.zero_()

    def add(self, partials: Partials) -> list[Tensor]:
        """Add to the message what is to be added to it, after `prepare`; return messages with what stays apart."""
        for index in self.absent:
            if partials.has(self.slots[index].parameter):
                self.used_counts[index] = 1
                if index in self.unused:
                    self.unused.remove(index)
        with torch.no_grad():
            for merge in partials.merged:
                found = [slot for slot in self.slots if slot.parameter in merge.gradients]
                alone = [
                    slot.place
                    for slot in self.slots
                    if slot.parameter not in merge.gradients
                    and not (slot.has_arrived and slot.parameter in merge.in_place)
                ]
                added = [merge.gradients.pop(slot.parameter) for slot in found]
                add_each([slot.place for slot in found], added)
                add_zero(alone)
                if self.streams is not None:
                    self.streams.keep_until_read(added)
        return [self._pack(gradients) for gradients in partials.kept]

    def take(self, result: Tensor) -> None:
        """Let `result`, which a hook made, be the reduced gradients."""
        if result is not self.gradients:
            self.gradients.copy_(result.reshape(-1))

    def write_back(self, counts: Sequence[float], factor: float = 1.0) -> None:
        """Give each parameter its reduced gradient times `factor`; one that no rank had stays as it was.

        `counts`, how many ranks had each gradient, is read for absent ones.
        """
        if factor != 1.0:
            unused = {index for index in self.absent if not counts[index]}
            foreach_mul_([slot.place for index, slot in enumerate(self.slots) if index not in unused], factor)
        for index in self.absent:
            self.slots[index].write_back(counts[index])
        for slot in self.slots:
            if not slot.lies_in_bucket and slot.has_arrived:
                slot.write_back(1)
            slot.is_unsynced = False

    def reset(self) -> None:
        self.num_pending = len(self.slots)
        for slot in self.slots:
            slot.has_arrived = slot.is_scaled = False
            slot.kept = None
        while self._elsewhere:
            slot = self._elsewhere.pop()
            if not slot.is_shared:
                slot.use_bucket()

    def _keep_held(self) -> None:
        """Take new memory, and leave the old one to those who hold a part of it. [Note: held gradients].

        Not if nothing was cleared: then a view of a gradient that is added to changes in torch as well.
        """
        if all(slot.parameter.grad is slot.place for slot in self.slots):
            return
        old, fresh = storage_address(self._storage), self._allocate().untyped_storage()
        with torch.no_grad():
            for part in self._parts:
                if storage_address(part.untyped_storage()) == old:  # the trailer may lie elsewhere
                    part.set_(fresh, part.storage_offset(), part.shape, part.stride())
        for slot in self.slots:
            slot.renew_place()
        self._addresses = [slot.place.data_ptr() for slot in self.slots]
        self._storage = fresh

    def _pack(self, gradients: Gradients) -> Tensor:
        """Take from `gradients` what belongs here, laid out as the message is."""
        packed = torch.zeros_like(self.message)
        places, found = [], []
        for slot, offset in zip(self.slots, self._offsets, strict=True):
            gradient = gradients.pop(slot.parameter, None)
            if gradient is not None:
                flat = packed[offset : offset + gradient.numel()]
                places.append(make_view(flat, *slot.layout, as_view=True))
                found.append(gradient)
        if found:
            foreach_copy_(places, found)
        if self.streams is not None:
            self.streams.keep_until_read(found)
        return packed

    def _find_absent(self) -> list[int]:
        if all(map(_HAS_ARRIVED, self.slots)):
            return []
        return [index for index, slot in enumerate(self.slots) if not slot.has_arrived]

    def _adopt_small(self) -> None:
        """Copy what is not in its place yet, all at once: there may be hundreds, so most of this runs in C."""
        pairs = zip(self.slots, map(_GRADIENT, self._parameters), strict=True)
        moved = [slot for slot, each in pairs if each is not None and each is not slot.place and slot.has_arrived]
        if not moved:
            return
        if max(map(getrefcount, map(_PLACE, moved))) > REFERENCES_OF_ONE_HOLDER:
            for slot in moved:
                slot.keep_held()
        places, gradients = list(map(_PLACE, moved)), list(map(_GRADIENT, map(_PARAMETER, moved)))
        if any(map(_IS_SPARSE, gradients)):
            gradients = [slot.as_dense(each) for slot, each in zip(moved, gradients, strict=True)]
        with torch.no_grad():
            foreach_copy_(places, gradients)
        for slot, place in zip(moved, places, strict=True):
            if slot.lies_in_bucket:
                slot.parameter.grad = place
        if self.streams is not None:
            self.streams.keep_until_read(gradients)


@final
class SparseSlot:
    has_gradient_in_place = False
    is_small = True
    is_scaled = False

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.fits = True
        self.has_arrived = False
        self.is_unsynced = False

    def take(self, scale: float) -> None:
        """Do nothing: a sparse gradient is taken when its bucket is sent."""

    def adopt(self) -> None:
        """Do nothing, likewise."""

    def take_second(self) -> None:
        """Do nothing, likewise."""

    def detach_gradient(self) -> Tensor | None:
        gradient, self.parameter.grad = self.parameter.grad, None
        return gradient


@final
class SparseBucket:
    """One sparse gradient, without a buffer: its length differs from rank to rank. Some groups cannot add such ones."""

    def __init__(
        self, name: str, parameter: nn.Parameter, used_counts: Tensor, streams: BackwardStreams | None = None
    ) -> None:
        self.slots = [SparseSlot(name, parameter)]
        self.used_counts = used_counts
        self.num_pending = 1
        self.streams = streams
        self.absent: list[int] = []
        self.unused: list[int] = []
        self.message = _nothing(parameter)

    def begin(self) -> None:
        """Do nothing: a sparse gradient lies in memory of its own."""

    @property
    def gradients(self) -> Tensor:
        return self.message

    def prepare(self, scale: float) -> None:
        if self.streams is not None:
            self.streams.join()
        (slot,) = self.slots
        gradient = slot.parameter.grad if slot.fits else None
        if gradient is not None and not gradient.is_sparse:
            raise ReductionError(
                f"Parameter {slot.name} has a dense gradient, and its embedding says sparse=True. Build the embedding "
                "with sparse=False, or use its weight in nothing else. (LS308)"
            )
        self.message = _nothing(slot.parameter) if gradient is None else gradient.detach().coalesce() * scale
        self.count_used()

    def name_nonfinite(self) -> str:
        return "" if is_finite(self.message) else self.slots[0].name

    def prepare_nothing(self) -> None:
        self.message = _nothing(self.slots[0].parameter)
        self.count_nothing()

    def count_used(self) -> None:
        (slot,) = self.slots
        slot.is_unsynced = slot.is_unsynced and slot.fits and slot.parameter.grad is not None
        self.absent = [] if slot.has_arrived else [0]
        self.unused = [] if slot.has_arrived or slot.is_unsynced else [0]
        self.used_counts.fill_(1 - len(self.unused))

    def count_nothing(self) -> None:
        self.absent, self.unused = [0], [0]
        self.used_counts.zero_()

    def add(self, _partials: Partials) -> list[Tensor]:
        """Add nothing: where ranks run several shards each, gradients are dense."""
        return []

    def take(self, result: Tensor) -> None:
        self.message = result

    def write_back(self, counts: Sequence[float], factor: float = 1.0) -> None:
        (slot,) = self.slots
        if slot.fits and (not self.absent or counts[0] > 0):
            reduced = self.message.coalesce()
            slot.parameter.grad = reduced if factor == 1.0 else reduced * factor
        slot.is_unsynced = False

    def reset(self) -> None:
        self.num_pending = 1
        self.slots[0].has_arrived = False


def _nothing(parameter: nn.Parameter) -> Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


Bucket = DenseBucket | SparseBucket
AnySlot = Slot | SparseSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSet:
    buckets: tuple[Bucket, ...]
    """In the order in which they are sent."""
    trailer: Tensor
    """The part of the last message where the status is written and read; empty if it is not sent with it."""
    extra_message: Tensor | None
    """Counts and trailer, if they have a message of their own, after that of the last bucket."""
    streams: tuple[BackwardStreams, ...] = ()


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
    """Return how many ranks had each gradient, () for buckets not `needed`; waits once for an asynchronous device."""
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
