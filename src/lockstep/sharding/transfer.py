"""Sending a part of the state of a run to another worker: plain values as JSON, and tensors."""

import json
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.manifest import decode_state, encode_state
from lockstep.comm import World, calls_for
from lockstep.errors import CheckpointError, without_code
from lockstep.torch_private.modules import byte_view

_PURPOSE = "sending the state of the run to another worker"
_MIN_BYTES: Final = 1 << 16


def send_state(world: World, state: Any, targets: Sequence[int]) -> None:
    """Send a nested value as JSON and tensors, so that receiving it runs nothing (collective with `targets`)."""
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode_state(state, "state", tensors)
    except CheckpointError as error:
        raise CheckpointError(
            f"The state of the run cannot be sent to a new worker. {without_code(error)} (LS704)"
        ) from error
    specs = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([encoded, specs]).encode()), dtype=torch.uint8)
    parts = [byte_view(each) for each in tensors.values()]
    small = torch.cat([part for part in parts if len(part) < _MIN_BYTES] or [text[:0]])
    large = [part for part in parts if len(part) >= _MIN_BYTES]
    for target in targets:
        with calls_for(_PURPOSE):
            for tensor in (torch.tensor([len(text), len(small)]), text, small, *large):
                if len(tensor):
                    dist.send(tensor, group=world.group, group_dst=target)


def receive_state(world: World, source: int, own: Any) -> Any:
    """Return what `send_state` sends on rank `source`, with all tensors on the CPU (collective for both).

    Tensors of `own` are overwritten where they are as the one that is sent in their place: new memory is slower to
    write to than a message.
    """

    def receive(tensor: Tensor) -> Tensor:
        if len(tensor):
            dist.recv(tensor, group=world.group, group_src=source)
        return tensor

    found: dict[str, Tensor] = {}
    encode_state(own, "state", found)
    places = {
        name: each for name, each in found.items() if each.is_cpu and byte_view(each).data_ptr() == each.data_ptr()
    }
    with calls_for(_PURPOSE):
        num_text, num_small = receive(torch.zeros(2, dtype=torch.int64)).tolist()
        text = receive(torch.empty(num_text, dtype=torch.uint8))
        small = receive(torch.empty(num_small, dtype=torch.uint8))
        encoded, specs = json.loads(text.numpy().tobytes())
        tensors: dict[str, Tensor] = {}
        for name, kind, shape in specs:
            dtype = getattr(torch, kind)
            tensor = places.get(name)
            if tensor is None or (tensor.dtype, tensor.shape) != (dtype, torch.Size(shape)):
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            tensors[name] = tensor
            if tensor.nbytes < _MIN_BYTES:
                byte_view(tensor).copy_(small[: tensor.nbytes])
                small = small[tensor.nbytes :]
            else:
                receive(byte_view(tensor))
    return decode_state(encoded, tensors)
