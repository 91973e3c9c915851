"""The buffers of a model at a moment: which tensors there are, and their values.

[Note: buffers that are replaced] A forward may write a buffer, put another tensor in its place, of another shape even,
or make one where there was none. So both are recorded: which tensors there were, and their values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn

from lockstep.torch_private.modules import buffer_registry, foreach_copy_

_SHAPE = attrgetter("shape")
_ALIGNMENT_BYTES = 16

BufferParts = Sequence[dict[str, Tensor | None]]
"""The dictionaries in which modules keep their buffers, in the order of the modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """A buffer as rank 0 describes it."""

    number: int
    """Equal for two names of one tensor."""
    shape: tuple[int, ...]
    memory_shape: tuple[int, ...]
    """The shape of the part that has memory; another one for an expanded tensor."""
    dtype: torch.dtype
    is_on_cpu: bool
    """Whether it is on the CPU, wherever the model is."""


BufferSpecs = list[dict[str, BufferSpec | None]]
"""The buffers of every module, in the order of the modules."""


def buffer_parts(model: nn.Module) -> BufferParts:
    return [buffer_registry(module) for module in model.modules()]


@final
class FlatMemory:
    """Memory for tensors of any dtypes, kept from step to step: one flat tensor of bytes per device.

    One message carries them then, and one operation chooses between two copies.

    `values` are views of it, one for each tensor that it was fitted to.
    """

    def __init__(self) -> None:
        self._specs: list[tuple[torch.device, torch.dtype, torch.Size]] = []
        self.flat_by_device: dict[torch.device, Tensor] = {}
        self.values: list[Tensor] = []

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Make room for tensors like these; return whether they are others than before."""
        specs = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
        if specs == self._specs:
            return False
        self._specs = specs
        offsets, totals = [], dict.fromkeys((device for device, _, _ in specs), 0)
        for tensor in tensors:
            offsets.append(totals[tensor.device])
            totals[tensor.device] += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # Bytes, so that one message or operation takes every dtype, also those that a backend cannot add up.
        self.flat_by_device = {
            device: torch.zeros(total, dtype=torch.uint8, device=device) for device, total in totals.items()
        }
        self.values = [
            self.flat_by_device[tensor.device][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(offsets, tensors, strict=True)
        ]
        return True


@final
class BufferSnapshot:
    """The buffers of a model at a moment. [Note: buffers that are replaced].

    Its memory is kept from record to record, as long as the model has the same buffers.
    `live` holds every buffer once, in the order of the names, as a tensor that shares its memory; `values` are copies.
    """

    def __init__(self, parts: BufferParts, *, prefers_flat: bool = False) -> None:
        self._parts = parts
        self._prefers_flat = prefers_flat
        self.is_flat = prefers_flat
        self.memory = FlatMemory()
        self._buffers: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._places: list[tuple[int, int, torch.Size]] = []
        self.names: list[dict[str, Tensor | None]] = []
        self.live: list[Tensor] = []
        self.values: list[Tensor] = []

    def record(self) -> None:
        names = [dict(part) for part in self._parts]
        buffers = unique_buffers(names)
        places = _places(buffers)
        if places == self._places:
            copy_each(self.values, self.live)
        else:
            whole = [buffer.data for buffer in buffers]
            live = list(map(without_repeats, whole))
            self.is_flat = self._prefers_flat and all(tensor.layout is torch.strided for tensor in live)
            self.values = self._copy_flat(live) if self.is_flat else [tensor.clone() for tensor in live]
            self._buffers, self._places, self._whole, self.live = buffers, places, whole, live
        self.names = names

    def _copy_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.memory.fit(tensors)
        copy_each(self.memory.values, tensors)
        return self.memory.values

    def put_back(self) -> None:
        self.restore_names()
        if _places(self._buffers) != self._places:
            for buffer, whole, place in zip(self._buffers, self._whole, self._places, strict=True):
                if _places([buffer]) != [place]:  # it was resized, or given other memory
                    buffer.data = whole
        copy_each(self.live, self.values)

    def copy_of(self, buffer: Tensor) -> Tensor:
        return next(value for each, value in zip(self._buffers, self.values, strict=True) if each is buffer)

    @contextmanager
    def kept(self) -> Iterator[None]:
        self.record()
        try:
            yield
        finally:
            self.put_back()

    def restore_names(self) -> None:
        """Let the model's buffers be the recorded tensors again, whatever is in them."""
        for part, names in zip(self._parts, self.names, strict=True):
            if part or names:
                part.clear()
                part.update(names)

    def is_other_layout(self, parts: BufferParts) -> bool:
        """Return whether `parts` are other buffers than the recorded ones, or of other shapes."""
        now = list(_tensors(parts))
        if list(map(id, now)) == list(map(id, _tensors(self.names))):
            shapes = {number: shape for number, _, shape in self._places}
            return any(buffer.shape != shapes[id(buffer)] for buffer in now)
        recorded = {number: whole for (number, _, _), whole in zip(self._places, self._whole, strict=True)}
        return describe_buffers(parts) != describe_buffers(self.names, recorded)


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that has memory, which can be written; another tensor as it is."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _places(buffers: Sequence[Tensor]) -> list[tuple[int, int, torch.Size]]:
    """Return of each buffer which tensor it is, the address of its memory, and its shape."""
    try:
        addresses = list(map(Tensor.data_ptr, buffers))
    except RuntimeError:  # one is sparse, and has no memory of its own
        addresses = [each.data_ptr() if each.layout is torch.strided else 0 for each in buffers]
    return list(zip(map(id, buffers), addresses, map(_SHAPE, buffers), strict=True))


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the values of each source to its target; none of them has a graph."""
    if targets:
        foreach_copy_(list(targets), list(sources))


def describe_buffers(parts: BufferParts, recorded: Mapping[int, Tensor] = MappingProxyType({})) -> BufferSpecs:
    """Describe buffers; those in `recorded`, by id, as they were recorded."""
    numbers: dict[int, int] = {}

    def describe(buffer: Tensor | None) -> BufferSpec | None:
        if buffer is None:
            return None
        tensor = recorded.get(id(buffer), buffer)
        return BufferSpec(
            number=numbers.setdefault(id(buffer), len(numbers)),
            shape=tuple(tensor.shape),
            memory_shape=tuple(without_repeats(tensor).shape),
            dtype=tensor.dtype,
            is_on_cpu=tensor.device.type == "cpu",
        )

    return [{name: describe(buffer) for name, buffer in part.items()} for part in parts]


def _tensors(parts: Iterable[dict[str, Tensor | None]]) -> Iterator[Tensor]:
    """Return the buffers that are there, in the order of their names."""
    return (buffer for buffer in chain.from_iterable(part.values() for part in parts) if buffer is not None)


def unique_buffers(parts: Iterable[dict[str, Tensor | None]]) -> list[Tensor]:
    """Return every buffer that is there once, in the order of their names."""
    return list({id(buffer): buffer for buffer in _tensors(parts)}.values())


def name_buffers(parts: Iterable[dict[str, Tensor | None]]) -> list[str]:
    """Return a name for each of `unique_buffers`, with the number of its module."""
    names: dict[int, str] = {}
    for number, part in enumerate(parts):
        for name, buffer in part.items():
            if buffer is not None:
                names.setdefault(id(buffer), f"{name} of module {number}")
    return list(names.values())
