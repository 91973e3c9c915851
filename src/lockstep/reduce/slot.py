"""The place of one gradient in its bucket, which becomes `.grad`, and the streams on which gradients arrive.

[Note: held gradients] In torch `.grad` has memory of its own, so whoever holds it, or a view of it, after it was
cleared keeps its values. Here the next gradient comes to the same place. So before a place is written, reference counts
show who else holds it: that of the tensor counts other references to the tensor itself, that of the bucket's memory
counts views, detached tensors and arrays. The held one keeps the memory, or gets a copy.

[Note: gradients in other memory] A gradient that lay elsewhere before the backward, as in the user's own flat buffer,
stays there: it is copied to its place, and what is reduced is copied back. So is one that several reducers share.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.errors import ReductionError
from lockstep.reduce.plan import ParameterSpec
from lockstep.reduce.tensor_bits import multiply
from lockstep.torch_private.compiler import keep_compiler_out
from lockstep.torch_private.modules import REFERENCES_OF_ONE_HOLDER

_SMALL_ELEMENTS = 1 << 14
"""Gradients below are copied together with others: a call of its own would take longer than the copying."""
_IS_SMALL: Final = attrgetter("is_small")


@final
class Slot:
    __slots__ = (
        "__weakref__",
        "_is_view",
        "fits",
        "flat",
        "has_arrived",
        "is_finite",
        "is_scaled",
        "is_shared",
        "is_small",
        "is_unsynced",
        "kept",
        "layout",
        "lies_in_bucket",
        "name",
        "parameter",
        "place",
        "takes_sparse",
    )

    def __init__(
        self, spec: ParameterSpec, parameter: nn.Parameter, flat: Tensor, *, as_view: bool, takes_sparse: bool = False
    ) -> None:
        self.name = spec.name
        self.parameter = parameter
        self.flat = flat
        self._is_view = as_view
        self.takes_sparse = takes_sparse
        self.layout = _make_layout(spec.shape, spec.stride)
        self.place = make_view(flat, *self.layout, as_view=as_view)
        self.use_bucket()
        self.fits = True
        self.has_arrived = False
        self.is_unsynced = False
        self.is_scaled = False
        self.is_finite = True
        self.kept: Tensor | None = None

    def use_bucket(self) -> None:
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
        return self.parameter.grad is self.place and self.is_in_bucket

    @property
    def is_in_bucket(self) -> bool:
        """Whether the place is where it was: `gradient.data = ...`, as in a cast of the model, takes it elsewhere."""
        return self.place.data_ptr() == self.flat.data_ptr()

    def find_in_other_memory(self) -> bool:
        """Find out whether the gradient lies in other memory, where it stays. [Note: gradients in other memory]."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place or not self.fits or gradient.is_sparse:
            return False
        self.lies_in_bucket = False
        return True

    def renew_place(self) -> None:
        """Make another tensor the place, and leave the old one as it is."""
        self.place = make_view(self.flat, *self.layout, as_view=self._is_view)

    def take(self, scale: float) -> None:
        """Put a gradient that has just been accumulated in its place, times `scale` if that costs nothing.

        Then `is_finite` says of it, on the CPU, whether it is.

        `is` is the right test for a gradient that is there already: accumulation adds in place, and while the place is
        held here, `.grad` hands out the same Python object.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place:
            return
        if scale == 1.0 or gradient.requires_grad or gradient.is_sparse or not self.lies_in_bucket:
            self.adopt()
            return
        self.keep_held()
        if self.place.is_cpu:
            self.is_finite = multiply(gradient, scale, self.place)
        else:
            torch.mul(gradient, scale, out=self.place)
        self.parameter.grad = self.place
        self.is_scaled = True

    def adopt(self) -> None:
        gradient = self.parameter.grad
        if gradient is None or gradient is self.place:
            return
        self.keep_held()
        self.place.copy_(self.as_dense(gradient.detach()))
        if self.lies_in_bucket:
            self.parameter.grad = self.place

    def take_second(self) -> None:
        """Copy the sum of two gradients of one backward; one that lies in its bucket was added there."""
        if not self.lies_in_bucket and not self.is_small:
            self.adopt()

    def as_dense(self, gradient: Tensor) -> Tensor:
        if not gradient.is_sparse:
            return gradient
        if not self.takes_sparse:
            raise ReductionError(
                f"Parameter {self.name} has a sparse gradient, and its bucket holds dense ones. Only "
                "torch.nn.Embedding and EmbeddingBag with sparse=True may have sparse ones; elsewhere, build them with "
                "sparse=False. (LS308)"
            )
        return gradient.to_dense()

    def fill_absent(self) -> None:
        """Contribute what `.grad` holds from before, or zeros, and remember it in case no rank has a new gradient."""
        if not self.fits or self.parameter.grad is None:
            if self.parameter.grad is self.place:
                self._move_out()  # of a frozen parameter, say: it is to stay as it is
            self.keep_held()
            self.place.zero_()
        else:
            self.adopt()
            self.kept = self.place.clone()

    def write_back(self, num_ranks_used: float) -> None:
        """Take the reduced values if any rank had a gradient, else put back what was there."""
        if self.fits and num_ranks_used > 0:
            self._write_reduced()
        elif self.kept is not None:
            self.place.copy_(self.kept)

    def _write_reduced(self) -> None:
        if self.lies_in_bucket:
            self.parameter.grad = self.place
        elif self.parameter.grad is None:
            self.parameter.grad = self.place.to(self.parameter.dtype, copy=True)
        else:
            self.parameter.grad.detach().copy_(self.place)

    def keep_held(self) -> None:
        """Let whoever holds a gradient that was cleared keep its values, before a write. [Note: held gradients]."""
        if getrefcount(self.place) > REFERENCES_OF_ONE_HOLDER:
            self._move_out()

    def keep_held_by_others(self) -> None:
        """Likewise, but let `.grad` change with the place if it lies there."""
        if getrefcount(self.place) > REFERENCES_OF_ONE_HOLDER + (self.parameter.grad is self.place):
            self._move_out()

    def detach_gradient(self) -> Tensor | None:
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


def _make_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> "tuple[tuple[int, ...], tuple[int, ...]]":
    """Return shape and strides of a place: those of the parameter, where they leave no holes."""
    like = torch.empty_strided(shape, strides, device="meta")
    if not torch.ops.aten.is_non_overlapping_and_dense(like):
        strides = torch.empty(shape, device="meta").stride()
    return shape, strides


def make_view(flat: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], *, as_view: bool) -> Tensor:
    """Return the elements of `flat` with a shape: a view as torch understands it, or a tensor that shares memory."""
    view = flat.as_strided(shape, strides)
    if as_view:
        return view
    with torch.no_grad():
        own = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return own.set_(flat.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@final
class PlainArrivals:
    """Notes at the least cost which gradients came, of the small ones that are sent at the end of a backward anyway.

    [Note: a hook that is switched] Of what a hook costs, a Python function is more than half, and a model may have
    hundreds of parameters. So the parameters of these gradients share one hook, a `functools.partial`: it calls a
    Python function until the gradients are known to be plain ([Note: plain arrivals] in
    `lockstep.reduce.backward_watch`), then the method `append` of a list, which is C code, and the function again when
    the backward is over, also by an exception.
    """

    def __init__(self, slots: Sequence[Slot], deliver: Callable[[Slot, nn.Parameter], None]) -> None:
        self._slots = {id(slot.parameter): slot for slot in slots}
        self._arrived: list[nn.Parameter] = []
        self.hook: Any = partial(_deliver_to_slot, deliver, self._slots)
        # Held here, as the hook may be running when it is switched.
        self._as_function = (self.hook.func, self.hook.args, self.hook.keywords, None)
        self._as_list: tuple[Any, ...] = (self._arrived.append, (), {}, None)

    def has(self, slot: object) -> bool:
        return isinstance(slot, Slot) and self._slots.get(id(slot.parameter)) is slot

    def begin(self) -> None:
        if all(map(_IS_SMALL, self._slots.values())):  # not if one is shared with another wrapper by now
            self.hook.__setstate__(self._as_list)

    def mark_arrived(self) -> None:
        """Mark the places of what was noted. A gradient may have come twice, as in a reentrant checkpoint."""
        for parameter in self._arrived:
            self._slots[id(parameter)].has_arrived = True
        self._arrived.clear()

    def end(self) -> None:
        self.hook.__setstate__(self._as_function)
        self._arrived.clear()


@keep_compiler_out
def _deliver_to_slot(
    deliver: Callable[[Slot, nn.Parameter], None], slots: Mapping[int, Slot], parameter: nn.Parameter
) -> None:
    deliver(slots[id(parameter)], parameter)


@final
class BackwardStreams:
    """The streams of one device on which the backward that is under way has left gradients or buckets.

    No gradient may be sent before it is there. The autograd engine runs each operation of a backward on the stream of
    its forward, and accumulates a gradient there. A model with two streams so has gradients on both, while a bucket is
    packed and sent on the stream of its last gradient:

        stream A    gradient 1 accumulated                                   (1)
        stream B          gradient 2 accumulated, the last of its bucket     (2)   waits for A, packs the bucket
        messages                                                             (3)   start after (2)
        caller's                                                             (4)   waits for A, B and the messages

    With one stream no waits are added: one event is recorded when a backward begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[torch.Stream] = []
        self._begun: torch.Event | None = None

    @property
    def are_several(self) -> bool:
        return len(self._seen) > 1

    def begin(self) -> None:
        current = torch.accelerator.current_stream(self._device)
        self._seen = [current]
        self._begun = current.record_event()

    def note_current(self) -> None:
        """Note that the current stream takes part. It waits for what the buckets had to do before this backward."""
        current = torch.accelerator.current_stream(self._device)
        if current not in self._seen:
            self._seen.append(current)
            if self._begun is not None:
                current.wait_event(self._begun)

    def join(self) -> None:
        """Let the current stream wait for all that have taken part so far."""
        self.note_current()
        if self.are_several:
            current = torch.accelerator.current_stream(self._device)
            for stream in self._seen:
                if stream != current:
                    current.wait_stream(stream)

    def keep_until_read(self, tensors: list[Tensor]) -> None:
        """The allocator would give memory of another stream to that stream's next tensor before this one reads it."""
        if self.are_several:
            current = torch.accelerator.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(current)


def make_streams(device: torch.device) -> BackwardStreams | None:
    accelerator = torch.accelerator.current_accelerator()
    return BackwardStreams(device) if accelerator is not None and accelerator.type == device.type else None
