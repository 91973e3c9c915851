"""Parameters that a forward writes: each worker runs other shards, so they would differ between workers.

[Note: parameters that are written] An average of the weights that a forward keeps in frozen parameters is updated once
per shard: after a step it would depend on which shards a worker has run. Writes show in a tensor's version, and
replaced memory in its address. Writes through `.data` show in neither; for them the contents are compared, in the first
steps only, for that reads every parameter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, calls_for
from lockstep.engine.batches import gather_results
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.modules import version_of

_NUM_READ = 3
"""The first steps in which contents are compared. An average that starts from equal weights is equal after step 1."""
_PURPOSE = "putting back parameters that a forward has written"


@final
class WrittenParameterCheck:
    """Checks whether parameters are written between the beginning of a step and the update."""

    def __init__(
        self,
        model: nn.Module,
        *,
        reads_contents: bool = True,
        others: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        named = {**dict(model.named_parameters()), **others}
        self.names = list(named)
        self._parameters = list(named.values())
        self._specs = list(map(_spec_of, self._parameters))
        self._num_reads = _NUM_READ if reads_contents else 0
        self._before: tuple[list[int], list[int]] | None = None
        self._bits: Tensor | None = None
        self._written: list[int] = []

    def begin(self) -> None:
        """Record versions, addresses and, in the first steps, contents of the parameters (local)."""
        self._written = []
        self._before = self._look()
        self._bits = self._read_bits() if self._num_reads else None

    def find_written(self) -> int:
        """Return the number of the first parameter that was written since `begin`, counted from 1 (local).

        0 if none was. The answer stays the same until the next `begin`.
        """
        if self._before is not None:
            before, self._before = self._before, None
            self._written = self._find(before)
        return min(self._written, default=0)

    def put_back(self, world: World) -> list[str]:
        """Give written parameters the values of a worker that has not written them (collective).

        Where a parameter was given memory of another shape, it gets memory of its own shape again.
        Returns the names of those that every worker has written, whose values are lost; the same on all.
        """
        with calls_for(_PURPOSE):
            found: list[list[int]] = world.gather_objects(self._written)
        sources = {
            number: next((rank for rank, written in enumerate(found) if number not in written), None)
            for number in sorted(set().union(*found))
        }
        sent = {number - 1: source for number, source in sources.items() if source is not None}
        memory: dict[torch.device, Tensor] = {}

        def allocate() -> None:
            for number in self._written:
                _restore_memory(self._parameters[number - 1], self._specs[number - 1])
            memory.update(_allocate_messages([self._parameters[index] for index in sent]))

        gather_results(world, allocate, _PURPOSE)  # before the first message: no rank waits for one without memory
        if world.group is not None:
            _broadcast_each(self._parameters, sent, memory, world)
        return [self.names[number - 1] for number, source in sources.items() if source is None]

    def _look(self) -> tuple[list[int], list[int]]:
        return list(map(version_of, self._parameters)), list(map(Tensor.data_ptr, self._parameters))

    def _find(self, before: tuple[list[int], list[int]]) -> list[int]:
        written = {
            number
            for earlier, now in zip(before, self._look(), strict=True)
            for number, (old, new) in enumerate(zip(earlier, now, strict=True), start=1)
            if old != new
        }
        if self._bits is not None:
            is_changed = (self._read_bits() != self._bits).tolist()  # the one wait for a device
            written.update(number for number, changed in enumerate(is_changed, start=1) if changed)
            self._num_reads, self._bits = self._num_reads - 1, None
        return sorted(written)

    def _read_bits(self) -> Tensor:
        """Return a number for the contents of each parameter, without waiting for a device."""
        device = self._parameters[0].device
        return torch.stack([sum_of_bits([parameter]).to(device) for parameter in self._parameters])


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemorySpec:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _spec_of(tensor: Tensor) -> _MemorySpec:
    return _MemorySpec(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _restore_memory(parameter: nn.Parameter, spec: _MemorySpec) -> None:
    """Give a parameter memory of its spec, if it has other memory; the values in it are any."""
    if (parameter.shape, parameter.dtype, parameter.device) != (spec.shape, spec.dtype, spec.device):
        parameter.data = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def _allocate_messages(parameters: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Return memory for the largest of these on each device: bytes, so that it carries every dtype."""
    sizes: dict[torch.device, int] = {}
    for each in parameters:
        sizes[each.device] = max(sizes.get(each.device, 0), each.nbytes)
    return {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}


@torch.no_grad()
def _broadcast_each(
    parameters: Sequence[nn.Parameter],
    sources: Mapping[int, int],
    memory: Mapping[torch.device, Tensor],
    world: World,
) -> None:
    """Overwrite parameters, by index, with those of the given ranks (collective)."""
    for index, source in sources.items():
        values = parameters[index].data
        message = memory[values.device][: values.nbytes]
        place = message.view(values.dtype).view(values.shape)
        if world.rank == source:
            place.copy_(values)
        with calls_for(_PURPOSE):
            dist.broadcast(message, group=world.group, group_src=source)
        if world.rank != source:
            values.copy_(place)
