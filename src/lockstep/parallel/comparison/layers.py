"""The layers of the model on each rank: were they made alike, and how did they run in the last forward?

A probability of dropout or an activation that differs shows in no parameter. It is compared when a model is wrapped, by
what `print(model)` shows, and warned of. In which mode each layer was, and whether autocast was on, is compared in each
backward.
"""

import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import TrainedModel
from lockstep.reduce.tensor_bits import sum_of_bits

_OF_THE_RANK = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+|(?<=[xn]pu:)\d+")
"""What differs between ranks that are alike: an address, as functions have it when they are printed; a device."""


@final
class ForwardState:
    """How the layers of a model ran in the last forward, on one rank."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._device_type = model.trained[0].spec.device.type
        self._number = 0
        self._precision = "off"

    def note(self) -> None:
        """Note it: a forward whose backward may be reduced has ended (local)."""
        self._precision = self._describe_precision()  # autocast may be over when the backward runs
        self._number = hash((tuple(self._model.modes()), zlib.crc32(self._precision.encode())))

    def number(self) -> int:
        return self._number

    def describe(self) -> Mapping[str, str]:
        """Return it in words: of each layer that is not in the model's own mode, and of autocast (local)."""
        root = self._model.module
        named = [] if root is None else list(root.named_modules())
        modes = {
            f"layer {name} ({type(layer).__name__})": "in training mode" if layer.training else "in evaluation mode"
            for name, layer in named
            if name
        }
        return {**modes, "autocast": self._precision}

    def _describe_precision(self) -> str:
        if not torch.is_autocast_enabled(self._device_type):
            return "off"
        return f"on, with {torch.get_autocast_dtype(self._device_type)}"


def warn_of_unlike_layers(model: TrainedModel, world: World) -> None:
    """Warn, on every rank, if layers were made with other options on some rank (collective)."""
    odd = _find_first_difference(_describe_layers(model), world)
    if odd is not None:
        warnings.warn(
            f"Layer {odd.name} of the wrapped model is {odd.here} on rank {odd.rank} and {odd.there} on rank 0. If "
            "that is not meant, build the model with the same options on every rank. This warning is given once. "
            "(LS320)",
            stacklevel=stacklevel_of_user(),
        )


def warn_of_unlike_buffers(model: TrainedModel, world: World) -> None:
    """Warn, on every rank, if buffers that nobody sends are not the same on all ranks (collective)."""
    odd = _find_first_difference({name: _describe_buffer(buffer) for name, buffer in model.buffers()}, world)
    if odd is not None:
        warnings.warn(
            f"Buffer {odd.name} of the wrapped model is {odd.here} on rank {odd.rank} and {odd.there} on rank 0, and "
            "with broadcast_buffers=False each rank keeps its own. Make it by the same seed on every rank, or leave "
            "broadcast_buffers out, which sends rank 0's. If each rank is to have its own, ignore this warning: "
            f'warnings.filterwarnings("ignore", message="Buffer {odd.name} of"). It is given once. (LS304)',
            stacklevel=stacklevel_of_user(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnlikePart:
    name: str
    rank: int
    here: str
    """What it is on that rank; `there` on rank 0."""
    there: str


def _find_first_difference(own: Mapping[str, str], world: World) -> _UnlikePart | None:
    """Return what is not the same on all ranks, by name (collective)."""
    if len(set(world.gather_objects(zlib.crc32(repr(own).encode())))) == 1:
        return None
    expected, *others = world.gather_objects(own)
    for rank, found in enumerate(others, start=1):
        for name in chain(expected, found):
            here, there = found.get(name, "not there"), expected.get(name, "not there")
            if here != there:
                return _UnlikePart(name=name, rank=rank, here=here, there=there)
    return None


def _describe_buffer(buffer: Tensor) -> str:
    shape = "x".join(map(str, buffer.shape)) or "scalar"
    can_be_read = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel()
    bits = f" with number {int(sum_of_bits([buffer])):x}" if can_be_read else ""
    return f"a tensor ({shape}, {buffer.dtype}){bits}"


def _describe_layers(model: TrainedModel) -> dict[str, str]:
    root = model.module
    return {name: _describe(layer) for name, layer in (() if root is None else root.named_modules())}


def _describe(layer: nn.Module) -> str:
    try:
        options = layer.extra_repr()
    except Exception:  # noqa: BLE001 - the user's own, which may need what is not there yet
        options = ""
    return _OF_THE_RANK.sub("", f"{type(layer).__name__}({options})")
