"""How a step of several shards treats the model's buffers.

[Note: buffers of shard 0] BatchNorm's running statistics come from the samples of one shard, as torch's come from those
of one rank. Which one must not depend on the number of workers, so it is shard 0: every shard starts from the buffers
that the step began with, and what shard 0 makes of them is kept. Rank 0 runs shard 0, as its first one.

    begin            copy the buffers                          so that a step that fails can put them back
    after each shard put the copy back before the next one;    after shard 0, copy its buffers first
    `start_sending`  rank 0 sends shard 0's buffers beside the last message of the reduction; not yet in the model
    `commit`         write shard 0's buffers, when every worker has them
    `undo`           put the copy back

[Note: buffers that are replaced] A forward may write a buffer, put another tensor in its place, of another shape even,
or make one where there was none. So both are recorded: which tensors there were, and their values. The message beside
the reduction has the shapes with which the step began. Where rank 0's buffers have others, it says so in the step
table, and all ranks exchange the new buffers before they continue (`exchange_new_layout`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, broadcast_tensors, calls_for
from lockstep.engine.raise_on_all import gather_results
from lockstep.torch_private import buffer_registry, foreach_copy_

_Parts = Sequence[dict[str, Tensor | None]]
"""The dictionaries in which modules keep their buffers, in the order of the modules."""
_ALIGNMENT_BYTES = 16
_PURPOSE = "sending shard 0's buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BufferSpec:
    """A buffer as rank 0 describes it."""

    number: int
    """Equal for two names of one tensor."""
    shape: tuple[int, ...]
    """Its shape."""
    memory_shape: tuple[int, ...]
    """The shape of the part that has memory; another one for an expanded tensor."""
    dtype: torch.dtype
    """Its dtype."""
    is_on_cpu: bool
    """Whether it is on the CPU, wherever the model is."""


_BufferSpecs = list[dict[str, _BufferSpec | None]]
"""The buffers of every module, in the order of the modules."""


@final
class ShardZeroBuffers:
    """Lets every shard of a worker start from the step's buffers, and keeps those of shard 0.

    Args:
        model: Whose buffers; its modules stay the same.
        world: The workers.
        device: Where buffers are that are not on the CPU.
    """

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        self._parts = [buffer_registry(module) for module in model.modules()]
        self._world = world
        self._device = device
        self._is_sent = world.group is not None and world.world_size > 1
        self._before = _Snapshot(self._parts)
        self._before.record()  # a step that fails before `begin` takes part in the message too
        self._shard_0 = _Snapshot(self._parts)
        self._message = _Message()
        self._is_recorded = False
        self._has_several = False
        self._has_copy_of_shard_0 = False
        self._send_error: Exception | None = None
        self._new: list[dict[str, Tensor | None]] | None = None

    def begin(self) -> None:
        """Record the buffers at the beginning of a step (local)."""
        self._is_recorded = self._has_several = self._has_copy_of_shard_0 = False
        self._send_error = self._new = None
        self._before.record()
        self._is_recorded = True

    def expect(self, num_shards: int) -> None:
        """Expect so many shards of this worker; with one, its buffers need not be put back after it (local)."""
        self._has_several = num_shards > 1

    def end_shard(self, shard: int, *, is_last: bool) -> None:
        """Put back what the shard's forward changed (local); call it after each backward, which may still read it."""
        if not self._has_several:
            return
        if shard == 0:
            self._shard_0.record()
            self._has_copy_of_shard_0 = True
        if not is_last:
            self._before.put_back()

    def has_new_layout(self) -> bool:
        """Whether shard 0 has left other buffers than the step began with, or of other shapes; asked on rank 0.

        Raises:
            Exception: What has failed when the buffers were to be sent.
        """
        if self._send_error is not None:
            raise self._send_error
        return self._before.is_other_layout(self._shard_0.names if self._has_copy_of_shard_0 else self._parts)

    def start_sending(self) -> Callable[[], None]:
        """Start to send shard 0's buffers to all, and return what waits for them (collective).

        It raises no error of its own: the other ranks need this message, even if this rank's step has failed.
        """
        if not self._is_sent or not self._before.live:
            return _do_nothing
        self._message.fit(self._before.live)
        if self._world.rank == 0:
            try:
                if not self.has_new_layout():
                    _copy_each(self._message.values, self._values_of_shard_0())
            except Exception as error:  # noqa: BLE001 - raised when this rank fills in its step table
                self._send_error = error
        assert self._world.group is not None
        with calls_for(_PURPOSE):
            works = [
                dist.broadcast(flat, group=self._world.group, group_src=0, async_op=True)
                for flat in self._message.flat_by_device.values()
            ]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return wait

    def exchange_new_layout(self) -> None:
        """Send rank 0's buffers to all where they have other shapes than the step began with (collective).

        When it returns, every rank has them. They are written by `commit`.

        Raises:
            PeerFailedError: Another rank could not make room for them.
        """
        if not self._is_sent:
            return
        assert self._world.group is not None
        source = self._shard_0.names if self._has_copy_of_shard_0 else self._parts
        with calls_for(_PURPOSE):
            specs: _BufferSpecs = self._world.gather_objects(_describe(source) if self._world.rank == 0 else None)[0]
        found: list[dict[str, Tensor | None]] = []

        def allocate() -> None:
            found.extend(_allocate(specs, self._device))
            if self._world.rank == 0:
                _copy_each(list(map(without_repeats, _unique(found))), self._values_of_shard_0())

        gather_results(self._world, allocate, _PURPOSE)
        if unique := _unique(found):
            broadcast_tensors(list(map(without_repeats, unique)), self._world.group)
        with calls_for(_PURPOSE):
            self._world.gather_objects(None)  # a rank that returns from this knows that all ranks have received them
        self._new = found

    def commit(self) -> None:
        """Let the model's buffers be those of shard 0 (local)."""
        self._is_recorded = False
        if self._world.rank == 0:
            if self._has_copy_of_shard_0:
                self._shard_0.put_back()
            return
        self._before.restore_names()
        if self._new is not None:
            _take_new(self._parts, self._new)
        elif self._before.live:
            _copy_each(self._before.live, self._message.values)

    def _values_of_shard_0(self) -> list[Tensor]:
        if self._has_copy_of_shard_0:
            return self._shard_0.values
        return [without_repeats(buffer.detach()) for buffer in _unique(self._parts)]

    def undo(self) -> None:
        """Let the model's buffers be what they were when the step began (local)."""
        self._send_error = None  # its traceback holds the step
        if self._is_recorded:  # else the record is that of an earlier step
            self._is_recorded = False
            self._before.put_back()


@final
class _Snapshot:
    """The buffers of a model at a moment. [Note: buffers that are replaced].

    Its memory is kept from step to step, as long as the model has the same buffers.

    Args:
        parts: The dictionaries in which modules keep their buffers.

    Attributes:
        names: The recorded buffers, by name.
        live: Every buffer once, in the order of the names, as a tensor that shares its memory.
        values: Copies of these.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._buffers: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._places: list[tuple[int, int, torch.Size]] = []
        self.names: list[dict[str, Tensor | None]] = []
        self.live: list[Tensor] = []
        self.values: list[Tensor] = []

    def record(self) -> None:
        """Record the buffers that there are now, and their values."""
        names = [dict(part) for part in self._parts]
        buffers = _unique(names)
        places = list(map(_place, buffers))
        if places == self._places:
            _copy_each(self.values, self.live)
        else:
            whole = [buffer.data for buffer in buffers]
            live = list(map(without_repeats, whole))
            self.values = [tensor.clone() for tensor in live]
            self._buffers, self._places, self._whole, self.live = buffers, places, whole, live
        self.names = names

    def put_back(self) -> None:
        """Let the model's buffers be the recorded ones again, with their values."""
        self.restore_names()
        for buffer, whole, place in zip(self._buffers, self._whole, self._places, strict=True):
            if _place(buffer) != place:  # it was resized, or given other memory
                buffer.data = whole
        _copy_each(self.live, self.values)

    def restore_names(self) -> None:
        """Let the model's buffers be the recorded tensors again, whatever is in them."""
        for part, names in zip(self._parts, self.names, strict=True):
            if part or names:
                part.clear()
                part.update(names)

    def is_other_layout(self, parts: _Parts) -> bool:
        """Return whether `parts` are other buffers than the recorded ones, or of other shapes."""
        now = list(_tensors(parts))
        if list(map(id, now)) == list(map(id, _tensors(self.names))):
            shapes = {number: shape for number, _, shape in self._places}
            return any(buffer.shape != shapes[id(buffer)] for buffer in now)
        recorded = {number: whole for (number, _, _), whole in zip(self._places, self._whole, strict=True)}
        return _describe(parts) != _describe(self.names, recorded)


@final
class _Message:
    """The memory in which buffers travel, kept from step to step: one flat tensor per device.

    Attributes:
        flat_by_device: What is sent.
        values: A tensor for each buffer, in that memory.
    """

    def __init__(self) -> None:
        self._specs: list[tuple[torch.device, torch.dtype, torch.Size]] = []
        self.flat_by_device: dict[torch.device, Tensor] = {}
        self.values: list[Tensor] = []

    def fit(self, tensors: Sequence[Tensor]) -> None:
        """Have room for tensors like these."""
        specs = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
        if specs == self._specs:
            return
        self._specs = specs
        offsets, totals = [], dict.fromkeys((device for device, _, _ in specs), 0)
        for tensor in tensors:
            offsets.append(totals[tensor.device])
            totals[tensor.device] += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # Bytes, so that one message carries every dtype, also those that a backend cannot add up.
        self.flat_by_device = {
            device: torch.zeros(total, dtype=torch.uint8, device=device) for device, total in totals.items()
        }
        self.values = [
            self.flat_by_device[tensor.device][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(offsets, tensors, strict=True)
        ]


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that has memory, which can be written; another tensor as it is."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return id(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0, tensor.shape


@torch.no_grad()
def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        foreach_copy_(list(targets), list(sources))


def _allocate(specs: _BufferSpecs, device: torch.device) -> list[dict[str, Tensor | None]]:
    made: dict[int, Tensor] = {}

    def make(spec: _BufferSpec | None) -> Tensor | None:
        if spec is None:
            return None
        if spec.number not in made:
            place = torch.device("cpu") if spec.is_on_cpu else device
            made[spec.number] = torch.empty(spec.memory_shape, dtype=spec.dtype, device=place).expand(spec.shape)
        return made[spec.number]

    return [{name: make(spec) for name, spec in part.items()} for part in specs]


@torch.no_grad()
def _take_new(parts: _Parts, found: Sequence[dict[str, Tensor | None]]) -> None:
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


def _describe(parts: _Parts, recorded: Mapping[int, Tensor] = MappingProxyType({})) -> _BufferSpecs:
    """Describe buffers; those in `recorded`, by id, as they were recorded."""
    numbers: dict[int, int] = {}

    def describe(buffer: Tensor | None) -> _BufferSpec | None:
        if buffer is None:
            return None
        tensor = recorded.get(id(buffer), buffer)
        return _BufferSpec(
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


def _unique(parts: Iterable[dict[str, Tensor | None]]) -> list[Tensor]:
    """Return every buffer that is there once, in the order of their names."""
    return list({id(buffer): buffer for buffer in _tensors(parts)}.values())


def _do_nothing() -> None:
    """Do nothing: no message was sent, so there is none to wait for."""
