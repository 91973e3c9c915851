"""One bucket at work: its buffer, the views that become `.grad`, and what has arrived."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.reduce.plan import BucketPlan


@final
class Slot:
    """The place of one gradient in its bucket."""

    def __init__(self, name: str, parameter: nn.Parameter, view: Tensor, bucket: "Bucket") -> None:
        self.name = name
        self.parameter = parameter
        self.view = view
        self.bucket = bucket
        self.has_arrived = False
        self.is_unsynced = False
        self.is_scaled = False
        self.kept: Tensor | None = None

    def adopt_gradient(self) -> None:
        """Make `.grad` the view, with the values it has; does nothing when it is the view already.

        `is` is the right test: accumulation adds in place, and while the view is held here, `.grad` hands out the
        same Python object.
        """
        gradient = self.parameter.grad
        if gradient is not None and gradient is not self.view:
            self.view.copy_(gradient)
            self.parameter.grad = self.view

    def adopt_scaled_gradient(self, scale: float) -> None:
        """Make `.grad` the view, with the values it has times `scale`, in one pass over them."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.view or gradient.requires_grad:
            self.adopt_gradient()
        else:
            torch.mul(gradient, scale, out=self.view)
            self.parameter.grad = self.view
            self.is_scaled = True

    def fill_in_for_absent(self) -> None:
        """Contribute what `.grad` holds from before, or zeros, and remember it in case nobody has more."""
        if self.parameter.grad is None:
            self.view.zero_()
        else:
            self.adopt_gradient()
            self.kept = self.view.clone()

    def settle_absent(self, num_ranks_had_it: float) -> None:
        """Take the reduced values if any rank had a gradient, else put back what was there."""
        if num_ranks_had_it > 0:
            self.parameter.grad = self.view
        elif self.kept is not None:
            self.view.copy_(self.kept)
        self.kept = None


@final
class Bucket:
    """A buffer and its slots."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[tuple[str, nn.Parameter]], buffer: Tensor) -> None:
        self.buffer = buffer
        self.presence = self.buffer[plan.presence_offset :]
        self.slots = []
        for slot in plan.slots:
            name, parameter = parameters[slot.parameter]
            flat = self.buffer[slot.offset : slot.offset + parameter.numel()]
            self.slots.append(Slot(name, parameter, _view_like(flat, parameter), self))
        self.num_pending = len(self.slots)

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.num_pending = len(self.slots)
        for slot in self.slots:
            slot.has_arrived = False
            slot.is_scaled = False
            slot.kept = None

    def write_presence(self) -> None:
        """Say in the buffer which gradients this rank has, and fill in for the others."""
        self.presence.fill_(1)
        for index, slot in enumerate(self.slots):
            if not slot.has_arrived:
                # What was accumulated under no_sync counts as had, unless it was cleared since.
                slot.is_unsynced = slot.is_unsynced and slot.parameter.grad is not None
                slot.fill_in_for_absent()
                if not slot.is_unsynced:
                    self.presence[index] = 0

    def scale(self, factor: float) -> None:
        """Multiply by `factor` the gradients that were not when they arrived."""
        for slot in self.slots:
            if not slot.is_scaled:
                slot.view.mul_(factor)

    def settle(self) -> None:
        """Give each parameter its reduced gradient.

        Presence is looked at only where something was absent here: on a GPU the look waits for the device.
        """
        absent = [index for index, slot in enumerate(self.slots) if not slot.has_arrived]
        if absent:
            counts = torch.view_as_real(self.presence)[:, 0] if self.presence.is_complex() else self.presence
            counts_here = counts.tolist()
            for index in absent:
                self.slots[index].settle_absent(counts_here[index])
        for slot in self.slots:
            slot.is_unsynced = False


def _view_like(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """View `flat` with the shape of the parameter, and its strides where they leave no holes."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
