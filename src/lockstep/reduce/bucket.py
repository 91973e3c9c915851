"""One bucket at work: its buffer, the places that become `.grad`, and what has arrived.

backward begins    `begin`           what others hold keeps its memory, what others put there is noted
arrival            `Slot.take`       a large gradient goes to its place at once, scaled on the way
bucket is full     `prepare`         the small ones go together; what is absent is filled in; the rest is scaled
message is back    `settle`          `.grad` is the place, which now holds the reduced gradient

[Note: held gradients] In torch `.grad` has memory of its own, so whoever holds it, or a view of it, after it was
cleared keeps its values. Here the next gradient comes to the same place. So before a place is written it is asked who
else holds it: the tensor's reference count tells of the tensor itself, the count of the bucket's memory of views,
detached tensors and arrays. The held one keeps the memory, or gets a copy.

[Note: gradients in other memory] A gradient that lay elsewhere before the backward, as in the user's own flat buffer,
stays there: it is copied to its place, and what is reduced is copied back. So is one that several reducers share.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import final

import torch
from torch import Tensor, nn

from lockstep.errors import ReductionError
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.partials import Gradients, Partials, add_each, add_zero
from lockstep.reduce.plan import BucketPlan

_SMALL_ELEMENTS = 1 << 14
"""Gradients below are copied together with others: a call of its own would take longer than the copying."""
_GRADIENT = attrgetter("grad")
_PLACE = attrgetter("place")
_REFERENCES_WHEN_OURS = 2
"""References to a place that only its slot holds: the attribute, and the argument of `getrefcount`."""


@final
class Slot:
    """The place of one gradient in its bucket.

    Args:
        name: Full name of the parameter.
        parameter: Whose gradient.
        flat: The elements of the bucket that are its own.
        as_view: Whether `.grad` should be a view, as torch understands it, or a tensor of its own that shares memory.
        takes_sparse: Whether a sparse gradient becomes dense, or is an error.
    """

    __slots__ = (
        "__weakref__",
        "_is_view",
        "fits",
        "flat",
        "has_arrived",
        "is_scaled",
        "is_shared",
        "is_small",
        "is_unsynced",
        "kept",
        "lies_in_bucket",
        "name",
        "parameter",
        "place",
        "takes_sparse",
    )

    def __init__(
        self, name: str, parameter: nn.Parameter, flat: Tensor, *, as_view: bool, takes_sparse: bool = False
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.flat = flat
        self._is_view = as_view
        self.takes_sparse = takes_sparse
        self.place = _place(flat, parameter, as_view=as_view)
        self.own()
        self.fits = True
        self.has_arrived = False
        self.is_unsynced = False
        self.is_scaled = False
        self.kept: Tensor | None = None

    def own(self) -> None:
        """Let `.grad` be the place, which is the rule."""
        self.is_shared = False
        self.lies_in_bucket = self.flat.dtype == self.parameter.dtype
        self.is_small = self.parameter.numel() < _SMALL_ELEMENTS

    def share(self) -> None:
        """Leave `.grad` to several reducers: it lies in no bucket, and is copied as soon as it arrives."""
        self.is_shared = True
        self.lies_in_bucket = self.is_small = False
        if self.parameter.grad is self.place:
            self._move_out()

    @property
    def has_gradient_in_place(self) -> bool:
        """Whether `.grad` is the place."""
        return self.parameter.grad is self.place and self.is_in_bucket

    @property
    def is_in_bucket(self) -> bool:
        """Whether the place is where it was: `gradient.data = ...`, as in a cast of the model, takes it elsewhere."""
        return self.place.data_ptr() == self.flat.data_ptr()

    def look_elsewhere(self) -> bool:
        """See whether there is a gradient in other memory, which stays there. [Note: gradients in other memory]."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place or not self.fits or gradient.is_sparse:
            return False
        self.lies_in_bucket = False
        return True

    def renew_place(self) -> None:
        """Make another tensor the place, and leave the old one as it is."""
        self.place = _place(self.flat, self.parameter, as_view=self._is_view)

    def take(self, scale: float) -> None:
        """Put a gradient that has just been accumulated in its place, times `scale` if that costs nothing.

        `is` is the right test for a gradient that is there already: accumulation adds in place, and while the place is
        held here, `.grad` hands out the same Python object.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place:
            return
        if scale == 1.0 or gradient.requires_grad or gradient.is_sparse or not self.lies_in_bucket:
            self.adopt()
            return
        self.leave_to_others()
        torch.mul(gradient, scale, out=self.place)
        self.parameter.grad = self.place
        self.is_scaled = True

    def adopt(self) -> None:
        """Put the gradient in its place, with the values it has."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place:
            return
        self.leave_to_others()
        self.place.copy_(self.as_dense(gradient.detach()))
        if self.lies_in_bucket:
            self.parameter.grad = self.place

    def take_again(self) -> None:
        """Take in that the gradient was added to since it was taken; where it lies in its bucket, it was so there."""
        if not self.lies_in_bucket and not self.is_small:
            self.adopt()

    def as_dense(self, gradient: Tensor) -> Tensor:
        """Return a dense gradient as it is, and a sparse one as a dense one.

        Raises:
            ReductionError: It is sparse, and that was not expected.
        """
        if not gradient.is_sparse:
            return gradient
        if not self.takes_sparse:
            raise _unexpected_sparse(self.name)
        return gradient.to_dense()

    def fill_in(self) -> None:
        """Contribute what `.grad` holds from before, or zeros, and remember it in case nobody has more."""
        if not self.fits or self.parameter.grad is None:
            if self.parameter.grad is self.place:
                self._move_out()  # of a frozen parameter, say: it is to stay as it is
            self.leave_to_others()
            self.place.zero_()
        else:
            self.adopt()
            self.kept = self.place.clone()

    def settle(self, num_ranks_had_it: float) -> None:
        """Take the reduced values if any rank had a gradient, else put back what was there."""
        if self.fits and num_ranks_had_it > 0:
            self._hand_out()
        elif self.kept is not None:
            self.place.copy_(self.kept)

    def reset(self) -> None:
        """Expect a gradient anew."""
        self.has_arrived = False
        self.is_scaled = False
        self.kept = None

    def _hand_out(self) -> None:
        if self.lies_in_bucket:
            self.parameter.grad = self.place
        elif self.parameter.grad is None:
            self.parameter.grad = self.place.to(self.parameter.dtype, copy=True)
        else:
            self.parameter.grad.detach().copy_(self.place)

    def leave_to_others(self) -> None:
        """Let whoever still holds the last gradient keep its values: the place is about to be written.

        Only for a gradient that was cleared meanwhile: in torch such a one has its own. [Note: held gradients]
        """
        if getrefcount(self.place) > _REFERENCES_WHEN_OURS:
            self._move_out()

    def take_away(self) -> Tensor | None:
        """Take the gradient away from the parameter, with its values and out of the bucket, and return it."""
        gradient = self.parameter.grad
        if gradient is self.place:
            self._move_out()
        self.parameter.grad = None
        return gradient

    def _move_out(self) -> None:
        """Give the tensor that is the place memory of its own, and make another one the place."""
        held = self.place
        self.renew_place()
        with torch.no_grad():
            held.set_(held.clone())  # type: ignore[call-overload]


@final
class DenseBucket:
    """A flat buffer with the gradients of several parameters.

    Args:
        plan: Its layout.
        parameters: Those of the plan, in registration order.
        buffer: Its memory.
        presence: How many ranks had each gradient: written before a reduction, read after it. [Note: presence]
        as_view: Whether `.grad` should be a view, as torch understands it.
        of_shards: Whether ranks run several shards each. Then sparse gradients become dense instead of being an error,
            and what `.grad` holds before a backward is this step's: a partial that was lent, or what the loss function
            put there.
        allocate: Returns a tensor like `buffer`, of zeros.

    Attributes:
        absent: Indices of the slots that got no gradient here before the last reduction.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[TrainedParameter],
        buffer: Tensor,
        presence: Tensor,
        *,
        as_view: bool,
        allocate: Callable[[], Tensor],
        of_shards: bool = False,
    ) -> None:
        self._buffer = buffer
        self._gradients = buffer[: plan.num_gradient_elements]
        self.presence = presence
        self.slots = []
        for slot in plan.slots:
            trained = parameters[slot.parameter]
            flat = buffer[slot.offset : slot.offset + trained.spec.num_elements]
            self.slots.append(Slot(trained.spec.name, trained.parameter, flat, as_view=as_view, takes_sparse=of_shards))
        self._offsets = [slot.offset for slot in plan.slots]
        self._parameters = [slot.parameter for slot in self.slots]
        self._as_view = as_view
        self._of_shards = of_shards
        self._allocate = allocate
        self._parts = [buffer, self._gradients, presence, *(slot.flat for slot in self.slots)]
        self._storage = buffer.untyped_storage()
        self._num_holders = 0
        self._addresses = [slot.place.data_ptr() for slot in self.slots]
        self._elsewhere: list[Slot] = []
        self.absent: list[int] = []
        self.num_pending = len(self.slots)

    @property
    def message(self) -> Tensor:
        """What is added up over the ranks."""
        return self._buffer

    @property
    def gradients(self) -> Tensor:
        """The part of it that a communication hook sees."""
        return self._gradients

    def count_holders(self, notes: Tensor) -> None:
        """Note how many tensors of ours lie in the bucket's memory; called when all do.

        Args:
            notes: A tensor that may be one of them.
        """
        self._parts.append(notes)
        self._num_holders = torch._C._storage_Use_Count(self._storage._cdata)  # noqa: SLF001 - has no public name

    def begin(self) -> None:
        """Begin with a backward: whose gradients are where? (local)."""
        if list(map(Tensor.data_ptr, map(_PLACE, self.slots))) != self._addresses:
            for slot in self.slots:
                if not slot.is_in_bucket:
                    slot.renew_place()
        if self._as_view:
            return
        if torch._C._storage_Use_Count(self._storage._cdata) > self._num_holders:  # noqa: SLF001
            self._leave_to_others()
        if self._of_shards or all(map(is_, map(_GRADIENT, self._parameters), repeat(None))):
            return
        self._elsewhere += [slot for slot in self.slots if slot.look_elsewhere()]

    def prepare(self, scale: float) -> None:
        """Make the message ready; `scale` what is not scaled already."""
        self._adopt_small()
        self._write_presence()
        if scale == 1.0:
            return
        unscaled = [slot.place for slot in self.slots if not slot.is_scaled]
        if len(unscaled) == len(self.slots):
            self._gradients.mul_(scale)
        elif unscaled:
            torch._foreach_mul_(unscaled, scale)

    def add(self, partials: Partials) -> list[Tensor]:
        """Add to the message what its gradients are to be added to; return other messages with what stays apart.

        For a bucket whose ranks run several shards each; called after `prepare`.
        """
        for index, slot in enumerate(self.slots):
            if not slot.has_arrived and partials.have(slot.parameter):
                self.presence[index] = 1
        with torch.no_grad():
            for merge in partials.merged:
                found = [slot for slot in self.slots if slot.parameter in merge.gradients]
                alone = [
                    slot.place
                    for slot in self.slots
                    if slot.parameter not in merge.gradients and not (slot.has_arrived and slot.parameter in merge.lent)
                ]
                add_each([slot.place for slot in found], [merge.gradients.pop(slot.parameter) for slot in found])
                add_zero(alone)
        return [self._pack(gradients) for gradients in partials.kept]

    def take(self, result: Tensor) -> None:
        """Let `result`, which a hook made, be the reduced gradients."""
        if result is not self._gradients:
            self._gradients.copy_(result.reshape(-1))

    def settle(self) -> None:
        """Give each parameter its reduced gradient.

        Presence is looked at only where something was absent here: on a GPU the look waits for the device.
        """
        absent = self.absent = [index for index, slot in enumerate(self.slots) if not slot.has_arrived]
        counts = read_numbers(self.presence) if absent else []
        for index in absent:
            self.slots[index].settle(counts[index])
        for slot in self.slots:
            if not slot.lies_in_bucket and slot.has_arrived:
                slot.settle(1)
            slot.is_unsynced = False

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.num_pending = len(self.slots)
        for slot in self.slots:
            slot.reset()
        while self._elsewhere:
            slot = self._elsewhere.pop()
            if not slot.is_shared:
                slot.own()

    def _leave_to_others(self) -> None:
        """Take new memory, and leave the old one to those who hold a part of it. [Note: held gradients].

        Not if nothing was cleared: then a view of a gradient that is added to sees that in torch as well.
        """
        if all(slot.parameter.grad is slot.place for slot in self.slots):
            return
        old, fresh = self._storage._cdata, self._allocate().untyped_storage()  # noqa: SLF001
        with torch.no_grad():
            for part in self._parts:
                if part.untyped_storage()._cdata == old:  # noqa: SLF001 - notes may travel by themselves
                    part.set_(fresh, part.storage_offset(), part.shape, part.stride())
        for slot in self.slots:
            slot.renew_place()
        self._addresses = [slot.place.data_ptr() for slot in self.slots]
        self._storage = fresh

    def _pack(self, gradients: Gradients) -> Tensor:
        """Take from `gradients` what belongs here, laid out as the message is."""
        packed = torch.zeros_like(self._buffer)
        places, found = [], []
        for slot, offset in zip(self.slots, self._offsets, strict=True):
            gradient = gradients.pop(slot.parameter, None)
            if gradient is not None:
                flat = packed[offset : offset + gradient.numel()]
                places.append(_place(flat, slot.parameter, as_view=True))
                found.append(gradient)
        if found:
            torch._foreach_copy_(places, found)
        return packed

    def _adopt_small(self) -> None:
        places, gradients = [], []
        found = list(map(_GRADIENT, self._parameters))
        for slot, gradient in zip(self.slots, found, strict=True):
            if gradient is None or gradient is slot.place or not slot.has_arrived:
                continue
            if getrefcount(slot.place) > _REFERENCES_WHEN_OURS:
                slot.leave_to_others()
            places.append(slot.place)
            gradients.append(slot.as_dense(gradient) if gradient.is_sparse else gradient)
            if slot.lies_in_bucket:
                slot.parameter.grad = slot.place
        if places:
            with torch.no_grad():
                torch._foreach_copy_(places, gradients)

    def _write_presence(self) -> None:
        self.presence.fill_(1)
        for index, slot in enumerate(self.slots):
            if not slot.has_arrived:
                # What was accumulated under no_sync counts as had, unless it was cleared since.
                slot.is_unsynced = slot.is_unsynced and slot.fits and slot.parameter.grad is not None
                slot.fill_in()
                if not slot.is_unsynced and not (self._of_shards and slot.kept is not None):
                    self.presence[index] = 0


def read_numbers(numbers: Tensor) -> list[float]:
    """Return the numbers of a tensor of any dtype; on a GPU this waits for the device."""
    real = torch.view_as_real(numbers)[:, 0] if numbers.is_complex() else numbers
    values: list[float] = real.tolist()
    return values


def _place(flat: Tensor, parameter: nn.Parameter, *, as_view: bool) -> Tensor:
    """Return `flat` with the shape of the parameter, and its strides where they leave no holes."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    view = flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape)
    if as_view:
        return view
    with torch.no_grad():
        own = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return own.set_(flat.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def _unexpected_sparse(name: str) -> ReductionError:
    return ReductionError(
        f"Parameter {name} has a sparse gradient, and its bucket holds dense ones. Only torch.nn.Embedding and "
        "EmbeddingBag with sparse=True may have sparse ones; elsewhere, build them with sparse=False."
    )
