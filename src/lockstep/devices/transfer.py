"""Moving a batch to the device of the model, and which accelerator this process has: CUDA, XPU, or that of a plug-in.

Code above this room goes through these functions, or through `torch.accelerator`, where it means "not the CPU".
"""

import copy
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`. Containers are made anew; other values are not changed.

    What else has a method `to`, as a user's batch class may, moves itself. Tensors of the CPU go through pinned memory:
    a copy from other memory would wait for all that the device has to do.
    """
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if value.device.type == "cpu" and value.layout is torch.strided and _is_accelerator(device):
            value = value.pin_memory()  # itself, where it lies there already
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        packed: Any = value
        return packed.to(device)  # which leaves its batch sizes on the CPU
    if isinstance(value, tuple):
        build = getattr(type(value), "_make", tuple)  # a named tuple is built by its own _make
        return build(to_device(item, device) for item in value)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if isinstance(value, dict):
        moved = copy.copy(value)  # keeps its kind: an OrderedDict, a defaultdict
        moved.update({key: to_device(item, device) for key, item in value.items()})
        return moved
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    move = getattr(value, "to", None)
    return move(device) if callable(move) else value


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def record_event(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """Return an event after all that the current stream of a device has to do by now.

    Without a stream, `torch.Event.record` takes that of the *current* device, which need not be where the model is.
    """
    event = torch.Event(device, enable_timing=is_timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def is_asynchronous(device: torch.device) -> bool:
    """Return whether operations on the device are queued, so that reading a value on the host waits for the device.

    Code that calls this, instead of comparing device types, can be tested with a fake asynchronous device on a CPU.
    """
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class PendingCopy:
    value: Any
    """Where it is copied on the copy stream: the copy. Else the value itself."""
    ended: torch.Event | None
    """When the copies are complete; None if none was started."""


@final
class InputCopies:
    """Copies inputs to a device; to an asynchronous one beside what it computes, else when they are asked for.

    A copy on the stream that computes begins when all work before it is done, and the work after it waits. On a stream
    of its own it begins at once, so it is done when the computation comes to it:

        compute stream   shard 0 ........................ | wait for 2 | shard 1 ..............
        copy stream      1 copy of shard 1 -- 2 event

    The memory of a copy belongs to the copy stream. `record_stream` keeps it until the computation is done with it;
    otherwise the next copy would get it, and overwrite what is still read.
    """

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


def current_accelerator() -> torch.device | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def own_accelerator(local_rank: str | None) -> torch.device | None:
    """Return the current accelerator if no other worker has it, as far as its local rank shows; None otherwise."""
    found = current_accelerator()
    is_own = found is not None and (torch.accelerator.device_count() == 1 or local_rank == str(found.index))
    return found if is_own and local_rank else None


def take_gpu(local_rank: int) -> str:
    """Make the GPU with this worker's local rank the current device; return why that is impossible, or an empty text.

    A worker that sees one GPU uses that one, whatever its local rank: its launcher has set CUDA_VISIBLE_DEVICES. A
    worker that has used its accelerator already keeps its current device.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or torch.get_device_module(found).is_initialized():
        return ""
    num_gpus = torch.accelerator.device_count()
    if num_gpus == 1:
        return ""
    if local_rank >= num_gpus:
        return (
            f"Worker {local_rank} of host {socket.gethostname()!r} has no GPU of its own: {num_gpus} can be seen "
            "there. Start at most one worker per GPU on a host. (LS908)"
        )
    torch.accelerator.set_device_index(local_rank)
    return ""
