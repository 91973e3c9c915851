"""How the status of the ranks travels: with the gradients, or from host to host.

[Note: two planes] To read what a device holds is to wait for the device. So where gradients lie on an asynchronous one,
what only hosts know (a failed backward, a changed model, batch sizes) travels over the group's CPU backend: it is sent
when the backward has been launched and read at its end, which waits for hosts and never for the device. Where the
gradients lie on the CPU it costs no message: it is a trailer of the last bucket. Either way a failure in a backward is
an error of that same backward on every rank, before anybody can step an optimizer.
"""

from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import calls_for
from lockstep.torch_private import device_types


class StatusChannel(Protocol):
    """Carries the numbers of one status per reduction; those of all ranks are added up."""

    def post(self, numbers: Sequence[float]) -> None:
        """Send this rank's numbers, or put them where they are sent from (collective)."""

    def receive(self) -> list[float]:
        """Return the sums over the ranks; called when all messages of the reduction have been waited for."""


@final
class StatusTrailer:
    """The end of the last message.

    Where the message lies on an asynchronous device, reading waits for it: that is so only for a group without a
    backend for the CPU, which has no other way to tell hosts anything.

    Args:
        place: That part of the message.
    """

    def __init__(self, place: Tensor) -> None:
        self._place = place

    def post(self, numbers: Sequence[float]) -> None:
        """Write the numbers into the message."""
        self._place.copy_(torch.tensor(numbers, dtype=torch.float32))

    def receive(self) -> list[float]:
        """Read them from the message."""
        return read_numbers(self._place)


@final
class StatusOverHosts:
    """A message of its own over the group's CPU backend. [Note: two planes].

    Args:
        group: The group.
        purpose: Of what this is the status, in words.
    """

    def __init__(self, group: ProcessGroup, purpose: str) -> None:
        self._group = group
        self._purpose = purpose
        self._numbers = torch.empty(0)
        self._work: dist.Work | None = None

    def post(self, numbers: Sequence[float]) -> None:
        """Start to add up the numbers (collective)."""
        self._numbers = torch.tensor(numbers, dtype=torch.float32)
        with calls_for(f"the status of {self._purpose}"):
            self._work = dist.all_reduce(self._numbers, group=self._group, async_op=True)

    def receive(self) -> list[float]:
        """Wait for the other hosts."""
        if self._work is not None:
            self._work.wait()
        return read_numbers(self._numbers)


def has_cpu_backend(group: ProcessGroup) -> bool:
    """Return whether a group moves tensors of the CPU (local)."""
    return any(device.type == "cpu" for device in device_types(group))


def read_numbers(numbers: Tensor) -> list[float]:
    """Return the numbers of a tensor of any dtype; on an asynchronous device this waits for it."""
    real = torch.view_as_real(numbers)[:, 0] if numbers.is_complex() else numbers
    values: list[float] = real.tolist()
    return values
