"""How a step of several shards treats buffers, the model's and those of networks that the loss uses.

[Note: buffers of shard 0] BatchNorm's running statistics come from the samples of one shard, as torch's come from those
of one rank. Which one must not depend on the number of workers, so it is shard 0: every shard starts from the buffers
that the step began with, and what shard 0 makes of them is kept. Rank 0 runs shard 0, as its first one.

    `begin`          copy the buffers                          so that a step that fails can put them back
    after each shard put the copy back before the next one;    after shard 0, copy its buffers first
    `start_sending`  rank 0 sends shard 0's buffers beside the last message of the reduction; not yet in the model
    `commit`         write shard 0's buffers, when every worker has them
    `undo`           put the copy back

[Note: buffers of another layout] The message beside the reduction has the shapes with which the step began. Where rank
0's buffers have others, it says so in the step table, and sends the new buffers in the second exchange.

[Note: buffers that are replaced] A forward may write a buffer, put another tensor in its place, of another shape even,
or make one where there was none. So both are recorded: which tensors there were, and their values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import TensorLayout, World, calls_for
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.torch_private.modules import buffer_registry, foreach_copy_

_SHAPE = attrgetter("shape")
_ALIGNMENT_BYTES = 16

BufferParts = Sequence[dict[str, Tensor | None]]
"""The dictionaries in which modules keep their buffers, in the order of the modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    number: int
    """Equal for two names of one tensor."""
    shape: tuple[int, ...]
    memory_shape: tuple[int, ...]
    """The shape of the part that has memory; another one for an expanded tensor."""
    dtype: torch.dtype
    is_on_cpu: bool


BufferSpecs = list[dict[str, BufferSpec | None]]


def buffer_parts(model: nn.Module) -> BufferParts:
    return [buffer_registry(module) for module in model.modules()]


@final
class FlatMemory:
    """Memory for tensors of any dtypes, kept from step to step: one flat tensor of bytes per device.

    One message carries them then, and one operation chooses between two copies. `values` are views of it, one for each
    tensor that it was fitted to.
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
        self._places: list[tuple[int, torch.Size]] = []
        self.names: list[dict[str, Tensor | None]] = []
        self._layout: tuple[list[int], list[str]] = ([], [])
        self._named: list[Tensor | None] = []
        self.live: list[Tensor] = []
        self.values: list[Tensor] = []

    def record(self) -> None:
        if self.names and self._are_names_recorded() and _places(self._buffers) == self._places:
            copy_each(self.values, self.live)
            return
        self.names = [dict(part) for part in self._parts]
        self._layout, self._named = self._read_layout(), list(_values(self.names))
        self._buffers = unique_buffers(self.names)
        self._places = _places(self._buffers)
        self._whole = [buffer.data for buffer in self._buffers]
        self.live = list(map(without_repeats, self._whole))
        self.is_flat = self._prefers_flat and all(tensor.layout is torch.strided for tensor in self.live)
        if self.is_flat:
            self.memory.fit(self.live)
            self.values = self.memory.values
            copy_each(self.values, self.live)
        else:
            self.values = [tensor.clone() for tensor in self.live]

    def _are_names_recorded(self) -> bool:
        return self._read_layout() == self._layout and all(map(is_, _values(self._parts), self._named))

    def _read_layout(self) -> tuple[list[int], list[str]]:
        return list(map(len, self._parts)), list(chain.from_iterable(part.keys() for part in self._parts))

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
        if self._are_names_recorded():
            return
        for part, names in zip(self._parts, self.names, strict=True):
            if part or names:
                part.clear()
                part.update(names)

    def is_other_layout(self, parts: BufferParts) -> bool:
        now = list(_tensors(parts))
        if list(map(id, now)) == list(map(id, _tensors(self.names))):
            shapes = {id(buffer): shape for buffer, (_, shape) in zip(self._buffers, self._places, strict=True)}
            return any(buffer.shape != shapes[id(buffer)] for buffer in now)
        recorded = {id(buffer): whole for buffer, whole in zip(self._buffers, self._whole, strict=True)}
        return describe_buffers(parts) != describe_buffers(self.names, recorded)


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that has memory, which can be written; another tensor as it is."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _places(buffers: Sequence[Tensor]) -> list[tuple[int, torch.Size]]:
    try:
        addresses = list(map(Tensor.data_ptr, buffers))
    except RuntimeError:  # one is sparse, and has no memory of its own
        addresses = [each.data_ptr() if each.layout is torch.strided else 0 for each in buffers]
    return list(zip(addresses, map(_SHAPE, buffers), strict=True))


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


def _values(parts: Iterable[dict[str, Tensor | None]]) -> Iterator[Tensor | None]:
    return chain.from_iterable(part.values() for part in parts)


def _tensors(parts: Iterable[dict[str, Tensor | None]]) -> Iterator[Tensor]:
    return (buffer for buffer in _values(parts) if buffer is not None)


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


_PURPOSE = "sending shard 0's buffers"


@final
class ShardZeroBuffers(StepPart):
    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._is_sent = world.group is not None and world.world_size > 1
        self.cover(model)
        self._is_recorded = False
        self._has_several = False
        self._has_copy_of_shard_0 = False
        self._send_error: Exception | None = None
        self._new: list[dict[str, Tensor | None]] | None = None
        self._new_layout = Column(bool, lambda _: world.rank == 0 and self.has_new_layout())
        self.columns = (self._new_layout,)

    def cover(self, model: nn.Module) -> None:
        """Treat the buffers of another module from the next step on (local)."""
        self._parts = buffer_parts(model)
        prefers_flat = is_asynchronous(self._device)
        self.before = BufferSnapshot(self._parts, prefers_flat=prefers_flat)
        self.before.record()  # a step that fails before `begin` takes part in the message too
        self._shard_0 = BufferSnapshot(self._parts, prefers_flat=prefers_flat)
        self._message = FlatMemory()
        self._layout: TensorLayout | None = None

    def begin(self, _step: CurrentStep) -> None:
        self.record()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        step.has_new_layout = rows[self._new_layout][0]
        if step.has_new_layout and self._is_sent:
            step.ask(_PURPOSE, self._send_new, self._take_new)

    def commit(self, step: CurrentStep) -> None:
        assert step.decision is not None
        if step.decision.is_skipped:
            self.put_back()
            return
        is_bad = step.decision.is_bad
        self._is_recorded = False
        self._write()
        if is_bad is not None and self.before.live:
            before, now = self.before, [without_repeats(buffer.data) for buffer in unique_buffers(self._parts)]
            self._message.fit(before.live)
            copy_each(self._message.values, now)
            (recorded,), (written,) = before.memory.flat_by_device.values(), self._message.flat_by_device.values()
            torch.where(is_bad, recorded, written, out=written)
            copy_each(now, self._message.values)

    def undo(self, _step: CurrentStep) -> None:
        self.put_back()

    def record(self) -> None:
        self._is_recorded = self._has_several = self._has_copy_of_shard_0 = False
        self._send_error = self._new = None
        self.before.record()
        self._is_recorded = True

    def end_shard(self, shard: int, *, is_last: bool) -> None:
        """Put back what the shard's forward changed (local); call it after each backward, which may still read it."""
        self._has_several |= not is_last
        if not self._has_several:
            return  # the buffers are those of the only shard
        if shard == 0:
            self._shard_0.record()
            self._has_copy_of_shard_0 = True
        if not is_last:
            self.before.put_back()

    @contextmanager
    def of_step_begin(self) -> Iterator[None]:
        with BufferSnapshot(self._parts).kept():
            self.before.put_back()
            yield

    def has_new_layout(self) -> bool:
        """Whether shard 0 has left other buffers or shapes; asked on rank 0. Raises what failed in `start_sending`."""
        if self._send_error is not None:
            raise self._send_error
        return self.before.is_other_layout(self._shard_0.names if self._has_copy_of_shard_0 else self._parts)

    def start_sending(self) -> Callable[[], None]:
        """Start to send shard 0's buffers to all, and return what waits for them (collective).

        It raises no error of its own: the other ranks need this message, even if this rank's step has failed.
        """
        if not self._is_sent or not self.before.live:
            return lambda: None
        assert self._world.group is not None
        if self._message.fit(self.before.live) or self._layout is None:
            named = zip(name_buffers(self.before.names), self.before.live, strict=True)
            self._layout = TensorLayout(named, self._world.group)
        layout = self._layout
        if self._world.rank == 0:
            try:
                if not self.has_new_layout():
                    copy_each(self._message.values, self._values_of_shard_0())
            except Exception as error:  # noqa: BLE001 - raised when this rank fills in its step table
                self._send_error = error
        with calls_for(_PURPOSE), layout.compared():
            works = [
                dist.broadcast(flat, group=self._world.group, group_src=0, async_op=True)
                for flat in self._message.flat_by_device.values()
            ]

        def wait() -> None:
            with layout.compared():
                for work in works:
                    if work is not None:
                        work.wait()

        return wait

    def _send_new(self) -> tuple[BufferSpecs, list[Tensor]] | None:
        if self._world.rank != 0:
            return None
        source = self._shard_0.names if self._has_copy_of_shard_0 else self._parts
        return describe_buffers(source), [each.cpu() for each in self._values_of_shard_0()]

    def _take_new(self, found: list[tuple[BufferSpecs, list[Tensor]] | None]) -> None:
        assert found[0] is not None
        specs, values = found[0]
        self._new = _make_buffers(specs, values, self._device)

    def can_be_left_out(self) -> bool:
        """Whether `commit` can leave the buffers as they were, by a truth value on the device (local)."""
        return self.before.is_flat and set(self.before.memory.flat_by_device) <= {self._device}

    def _write(self) -> None:
        if self._world.rank == 0:
            if self._has_copy_of_shard_0:
                self._shard_0.put_back()
            return
        self.before.restore_names()
        if self._new is not None:
            _take_new(self._parts, self._new)
        elif self.before.live:
            copy_each(self.before.live, self._message.values)

    def _values_of_shard_0(self) -> list[Tensor]:
        if self._has_copy_of_shard_0:
            return self._shard_0.values
        return [without_repeats(buffer.detach()) for buffer in unique_buffers(self._parts)]

    def put_back(self) -> None:
        """Put the recorded buffers back, if the step that has begun has not ended (local)."""
        self._send_error = None  # its traceback holds the step
        if self._is_recorded:  # else the record is that of an earlier step
            self._is_recorded = False
            self.before.put_back()


def _make_buffers(specs: BufferSpecs, values: Sequence[Tensor], device: torch.device) -> list[dict[str, Tensor | None]]:
    made: dict[int, Tensor] = {}

    def make(spec: BufferSpec | None) -> Tensor | None:
        if spec is None:
            return None
        if spec.number not in made:
            place = torch.device("cpu") if spec.is_on_cpu else device
            made[spec.number] = values[spec.number].to(place, copy=True).expand(spec.shape)
        return made[spec.number]

    return [{name: make(spec) for name, spec in part.items()} for part in specs]


@torch.no_grad()
def _take_new(parts: BufferParts, found: Sequence[dict[str, Tensor | None]]) -> None:
    """Have the buffers of rank 0; those of the same shape and dtype stay the same tensors, with other values."""
    taken: dict[int, Tensor] = {}
    for part, new in zip(parts, found, strict=True):
        wanted = {
            name: None if value is None else _take_one(part.get(name), value, taken) for name, value in new.items()
        }
        part.clear()
        part.update(wanted)


def _take_one(present: Tensor | None, value: Tensor, taken: dict[int, Tensor]) -> Tensor:
    if id(value) not in taken:
        taken[id(value)] = value
        if present is not None and present.shape == value.shape and present.dtype == value.dtype:
            target, source = without_repeats(present.data), without_repeats(value)
            if target.shape == source.shape:
                target.copy_(source)
                taken[id(value)] = present
    return taken[id(value)]
