"""How the status of the ranks travels: with the gradients, or from host to host.

[Note: two planes] To read what a device holds is to wait for the device. So where gradients lie on an asynchronous one,
what only hosts know (a failed backward, a changed model, batch sizes, used parameters) is sent over the group's CPU
backend when the backward and the messages were launched. Reading it waits for hosts and never for the device. Where the
gradients lie on the CPU it costs no message: it is a trailer of the last bucket. Either way a failure in a backward is
an error of that same backward on every rank, before any rank can step an optimizer.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import calls_for
from lockstep.reduce.streams import make_streams
from lockstep.torch_private.groups import device_types


class StatusChannel(Protocol):
    """Carries the numbers of one status per reduction; those of all ranks are added up."""

    @property
    def is_message(self) -> bool:
        """Whether it sends a message of its own; else the numbers are a part of the last message."""

    def post(self, numbers: Sequence[float], further: Sequence[float]) -> None:
        """Send this rank's numbers, or put them where they are sent from; an own message has `further` (collective)."""

    def receive(self) -> tuple[list[float], list[float]]:
        """Return the sums over the ranks of both; the second is empty where there is no message of its own.

        Where the status is a part of the last message, that must have been waited for.
        """


@final
class StatusTrailer:
    """The end of the last message.

    Where the message lies on an asynchronous device, reading waits for the device. That happens only with a group that
    has no backend for the CPU.
    """

    is_message = False

    def __init__(self, place: Tensor) -> None:
        self._place = place
        # Pinned, so that the copy does not wait for the device. Made once: pinned memory is slow to allocate. It may be
        # written again when the message was read, which is after the copy.
        is_pinned = place.device.type != "cpu" and make_streams(place.device) is not None
        self._numbers = torch.zeros(place.numel(), pin_memory=True) if is_pinned else torch.empty(0)

    def post(self, numbers: Sequence[float], further: Sequence[float]) -> None:  # noqa: ARG002 - no message of its own
        """Write the numbers into the message."""
        place = self._place
        if place.dtype is torch.float32 and place.is_cpu and place.numel() == len(numbers):
            # Not by torch: its two operations take as long as the rest of this.
            ctypes.memmove(place.data_ptr(), struct.pack(f"{len(numbers)}f", *numbers), place.nbytes)
            return
        values = torch.tensor(numbers, dtype=torch.float32)
        if self._numbers.numel() == values.numel():
            values = self._numbers.copy_(values)
        self._place.copy_(values, non_blocking=True)

    def receive(self) -> tuple[list[float], list[float]]:
        return read_numbers(self._place), []


@final
class StatusOverHosts:
    """A message of its own over the group's CPU backend. [Note: two planes]."""

    is_message = True

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        self._group = group
        self._purpose = purpose
        self._length = 0
        self._numbers = torch.empty(0)
        self._work: dist.Work | None = None

    def post(self, numbers: Sequence[float], further: Sequence[float]) -> None:
        """Start to add up the numbers (collective)."""
        self._length = len(numbers)
        self._numbers = torch.tensor([*numbers, *further], dtype=torch.float32)
        with calls_for(f"the status of {self._purpose}"):
            self._work = dist.all_reduce(self._numbers, group=self._group, async_op=True)

    def receive(self) -> tuple[list[float], list[float]]:
        """Wait for the other hosts."""
        if self._work is not None:
            self._work.wait()
        found = read_numbers(self._numbers)
        return found[: self._length], found[self._length :]


def has_cpu_backend(group: ProcessGroup) -> bool:
    """Return whether a group moves tensors of the CPU (local)."""
    return any(device.type == "cpu" for device in device_types(group))


def read_numbers(numbers: Tensor) -> list[float]:
    """Return the numbers of a tensor of any dtype; on an asynchronous device this waits for it."""
    real = torch.view_as_real(numbers)[:, 0] if numbers.is_complex() else numbers
    values: list[float] = real.tolist()
    return values
