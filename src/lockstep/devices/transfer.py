"""Moving a batch to the device of the model."""

import copy
from collections.abc import Mapping
from typing import Any

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
