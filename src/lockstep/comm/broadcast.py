"""Many tensors from one rank to all, in few messages."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ALIGNMENT_BYTES = 16
_MESSAGE_BYTES = 64 << 20


def broadcast_tensors(tensors: Sequence[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` with those of rank `source` of the group (collective).

    The values are written without autograd's knowledge: version counters stay, so that a graph which saved a
    buffer before the broadcast can still run its backward.

    Args:
        tensors: Dense tensors, the same number, shapes and dtypes on every rank; any dtype, any layout.
        group: The group; every rank of it must call.
        source: Rank within the group.
    """
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        for chunk in _chunks(tensor for tensor in tensors if tensor.device == device):
            _broadcast_chunk(chunk, group, source)


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


def _broadcast_chunk(tensors: list[Tensor], group: ProcessGroup, source: int) -> None:
    # Bytes, so that one message carries every dtype, those included that a backend cannot add up.
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    flat = torch.empty(offsets[-1], dtype=torch.uint8, device=tensors[0].device)
    places = [
        flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(offsets, tensors, strict=False)
    ]
    if dist.get_rank(group) == source:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach())
    dist.broadcast(flat, group=group, group_src=source)
    if dist.get_rank(group) != source:
        for place, tensor in zip(places, tensors, strict=True):
            tensor.data.copy_(place)
