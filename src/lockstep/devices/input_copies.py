"""Copying inputs to an asynchronous device beside what it computes.

A copy on the stream that computes begins when all work before it is done, and the work after it waits. On a stream of
its own it begins at once, so it is done when the computation comes to it:

    compute stream   shard 0 ........................ | wait for 2 | shard 1 ..............
    copy stream      1 copy of shard 1 -- 2 event

The memory of a copy belongs to the copy stream. `record_stream` keeps it until the computation is done with it;
otherwise the next copy would get it, and overwrite what is still read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lockstep.devices.asynchrony import is_asynchronous
from lockstep.devices.transfer import to_device


@dataclass(frozen=True, slots=True)
class PendingCopy:
    value: Any
    """Where it is copied on the copy stream: the copy. Else the value itself."""
    ended: torch.Event | None
    """When the copies are complete; None if none was started."""


@final
class InputCopies:
    """Copies values to one device; on a synchronous one when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_asynchronous = is_asynchronous(device)
        self._stream: torch.Stream | None = None

    def start(self, value: Any) -> PendingCopy:
        """Begin to copy a value, as `to_device` does, on a stream of its own if it consists of tensors of the CPU."""
        if not self._is_asynchronous or not self._can_copy(value):
            return PendingCopy(value, None)
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        with self._stream:
            copy = to_device(value, self._device)
        return PendingCopy(copy, self._stream.record_event())

    def finish(self, pending: PendingCopy) -> Any:
        """Return the copy; what the current stream does from now on comes after it. The host does not wait."""
        if pending.ended is None:
            return to_device(pending.value, self._device)
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(pending.ended)
        for leaf in _leaves(pending.value):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)
        return pending.value

    def move(self, value: Any) -> Any:
        """Return a copy of a value that is needed at once: it does not come after what the device has to do."""
        return self.finish(self.start(value))

    def __reduce__(self) -> tuple[type["InputCopies"], tuple[torch.device]]:
        """Return what a copy is made of: without the stream, which belongs to this process."""
        return InputCopies, (self._device,)

    def _can_copy(self, value: Any) -> bool:
        """Return whether there is a tensor to copy, and whether all that is copied can be seen.

        The memory of a user's batch class, which moves itself, could not be kept.
        """
        leaves = list(_leaves(value))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others_move = any(callable(getattr(leaf, "to", None)) for leaf in leaves if not isinstance(leaf, Tensor))
        return (
            not others_move
            and any(tensor.device.type == "cpu" for tensor in tensors)
            and all(tensor.layout is torch.strided for tensor in tensors)
            and all(tensor.device.type == "cpu" or tensor.device == self._device for tensor in tensors)
        )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what the containers that `to_device` rebuilds hold in the end."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, tuple | list) and not callable(getattr(value, "to", None)):  # a PackedSequence has it
        for item in value:
            yield from _leaves(item)
    else:
        yield value
