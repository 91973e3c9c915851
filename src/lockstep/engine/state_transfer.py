"""Sending the state of a run from the memory of one worker to that of a new one, without a file.

Large tensors are sent as they are; everything else, in which they are numbered places, is pickled. All arrive on the
CPU: whoever takes them copies them to its own device.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World, calls_for

_MIN_BYTES: Final = 1 << 16
"""A smaller tensor is pickled with the rest."""
_PURPOSE = "sending the state of the run to a new worker"


def send_state(world: World, state: Any, targets: Sequence[int]) -> None:
    """Send a nested value with tensors (collective for this rank and `targets`)."""
    stream = io.BytesIO()
    pickler = _StatePickler(stream)
    pickler.dump(state)
    packed = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
    for target in targets:
        with calls_for(_PURPOSE):
            for tensor in (torch.tensor([packed.numel()]), packed, *pickler.tensors):
                dist.send(tensor, group=world.group, group_dst=target)


def receive_state(world: World, source: int) -> Any:
    """Return what `send_state` sends on rank `source` (collective for both)."""

    def receive(tensor: Tensor) -> Tensor:
        dist.recv(tensor, group=world.group, group_src=source)
        return tensor

    with calls_for(_PURPOSE):
        size = int(receive(torch.zeros(1, dtype=torch.int64)))
        packed = receive(torch.empty(size, dtype=torch.uint8))
        unpickler = _StateUnpickler(io.BytesIO(packed.numpy().tobytes()))
        state = unpickler.load()
        for tensor in unpickler.tensors:
            receive(tensor)
    return state


@final
class _StatePickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:  # the name is pickle's
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if value.nbytes < _MIN_BYTES and value.device.type == "cpu":
            return None
        self.tensors.append(value.detach().cpu().contiguous().flatten())
        return value.dtype, tuple(value.shape)


@final
class _StateUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[Tensor] = []

    def persistent_load(self, place: Any) -> Tensor:  # the name is pickle's
        dtype, shape = place
        tensor = torch.empty(shape, dtype=dtype)
        self.tensors.append(tensor.view(-1))
        return tensor
