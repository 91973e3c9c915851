"""What is known of memory and of streams: who wrote which bytes, and who comes after whom. No torch mode in it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]
"""How many operations of which stream are known to come before."""


@final
@dataclass(frozen=True, slots=True)
class Access:
    """One operation on a part of a storage."""

    start: int
    """First byte."""
    stop: int
    """After the last one."""
    stream: int
    """Who does it."""
    count: int
    """Which of its operations it is."""

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop

    def is_within(self, start: int, stop: int) -> bool:
        return start <= self.start and self.stop <= stop


@final
@dataclass(slots=True)
class Memory:
    """What is known of one storage."""

    storage: StorageWeakRef
    is_on_device: bool
    is_pinned: bool = False
    writes: "list[Access]" = field(default_factory=list)
    """What wrote it; parts that were written anew are left out."""
    reads: "list[Access]" = field(default_factory=list)
    """What has read it since."""


MEMORY: Final[dict[int, Memory]] = {}
"""Where tensors are, those of all threads: a group hands them from one to another."""
Part = tuple[Memory, int, int]
"""A storage, and which bytes of it, from the first on to before the last."""


def is_on_device(tensor: Tensor) -> bool:
    memory = known(tensor)
    return memory is not None and memory.is_on_device


def mark(tensor: Tensor, *, is_on_device: bool, is_pinned: bool = False) -> None:
    """Note where a new tensor is."""
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        MEMORY[storage._cdata] = Memory(StorageWeakRef(storage), is_on_device, is_pinned)


def known(tensor: Tensor) -> Memory | None:
    if tensor.layout is not torch.strided:
        return None
    memory = MEMORY.get(tensor.untyped_storage()._cdata)
    return None if memory is None or memory.storage.expired() else memory


def memory_of(tensor: Tensor) -> Memory:
    memory = known(tensor)
    if memory is None:
        mark(tensor, is_on_device=False)
        memory = known(tensor)
    return memory or Memory(StorageWeakRef(torch.empty(0).untyped_storage()), is_on_device=False)


def part_of(tensor: Tensor) -> Part:
    """Return a storage and which bytes of it, from the first to the last, a tensor has."""
    memory = memory_of(tensor)
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return memory, 0, 0
    first = int(tensor.storage_offset())
    last: int = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return memory, first * tensor.element_size(), (last + 1) * tensor.element_size()


def find_unknown(accesses: Iterable[Access], start: int, stop: int, clock: Clock) -> Access | None:
    """Return an operation on these bytes that does not come before `clock`."""
    overlapping = (access for access in accesses if access.overlaps(start, stop))
    return next((access for access in overlapping if clock.get(access.stream, 0) < access.count), None)


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= count for stream, count in other.items())
