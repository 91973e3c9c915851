"""Many tensors from one rank to all, in few messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ALIGNMENT_BYTES = 16
_MESSAGE_BYTES = 64 << 20


def broadcast_tensors(tensors: Sequence[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with those of rank `source` of the group (collective).

    The values are written without autograd's knowledge: version counters stay, so that a graph which saved a
    buffer before the broadcast can still run its backward. Number, shapes and dtypes are the same on every rank.
    """
    for chunk in _chunks_of_each_device(tensors):
        _start_chunk(chunk, group, source, waits=True)()


def start_broadcast(tensors: Sequence[Tensor], group: ProcessGroup, source: int = 0) -> Callable[[], None]:
    """Begin to overwrite `tensors` as `broadcast_tensors` does; return what waits for that and ends it (collective)."""
    finishes = [_start_chunk(chunk, group, source, waits=False) for chunk in _chunks_of_each_device(tensors)]
    return partial(_call_each, finishes)


def _call_each(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _chunks_of_each_device(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        yield from _chunks(tensor for tensor in tensors if tensor.device == device)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.nbytes > _MESSAGE_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _start_chunk(tensors: list[Tensor], group: ProcessGroup, source: int, *, waits: bool) -> Callable[[], None]:
    # Bytes, so that one message carries every dtype, those included that a backend cannot add up.
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    flat = torch.empty(offsets[-1], dtype=torch.uint8, device=tensors[0].device)
    places = [
        flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(offsets, tensors, strict=False)
    ]
    if group.rank() == source:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach())
    work = dist.broadcast(flat, group=group, group_src=source, async_op=not waits)

    def finish() -> None:
        if work is not None:
            work.wait()
        if group.rank() != source:
            for place, tensor in zip(places, tensors, strict=True):
                tensor.data.copy_(place)

    return finish
