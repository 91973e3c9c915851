"""The values of a module's parameters and buffers, on every replica's device, with memory kept between forwards.

torch's DataParallel takes new memory for all replicas in every forward. Here it is taken once and filled anew, unless
somebody still needs what it holds.

[Note: kept memory] A copy may outlive its forward: autograd saves weights for backward, a script runs two forwards
before two backwards, a hook keeps a replica's tensor. Whoever holds a tensor, Python or autograd, holds a reference on
its storage, and the storage counts them. So memory is filled again only while its count is what it was when nobody had
been given a part of it; else the forward takes new memory, which is then the one to be kept. Work that a device has
still to do on old values is ordered before the refill by the stream, so memory belongs to the streams that were
current when it was made.

[Note: order of gradients] Each bucket of parameters is spread over the replicas by one node of the graph, whose
backward adds the replicas' gradients in the order of the replicas, whichever came first. A parameter that no replica
used gets no gradient, as without DataParallel; torch's gives it zeros. Buckets, so that the last layers' gradients are
added before the first layers' are there.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lockstep.reduce.plan import ALIGNMENT_BYTES
from lockstep.torch_private import foreach_copy_, storage_address, storage_use_count

BUCKET_BYTES = 25 << 20
"""About how much is sent, and added, at once."""

_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)


@final
class Copies:
    """Copies tensors to the devices of replicas, and keeps the memory for the next time.

    Safe to use from several threads. A copy of it, or one that was pickled, begins without memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[tuple[int, int], _Slab] = {}  # by bucket and replica

    def spread(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
        """Return the tensors for each replica: for replica 0 the same memory under another name, copies for the others.

        If grad mode is on, gradients of the results arrive, summed, at those `tensors` that require one.

        Args:
            tensors: Each once; all on the first device.
            devices: One per replica.
        """
        spread: list[list[Tensor]] = [[*tensors] for _ in devices]
        buckets = _buckets(tensors)
        with self._lock:
            for number, bucket in enumerate(buckets):
                members = [tensors[i] for i in bucket]
                targets = [
                    self._target(number, replica, devices[replica], members) for replica in range(1, len(devices))
                ]
                if members[0].requires_grad and torch.is_grad_enabled():
                    results = _spread(targets, *members)
                else:
                    with torch.no_grad():
                        results = _copies(targets, members)
                for place, tensor in enumerate(results):
                    spread[place // len(bucket)][bucket[place % len(bucket)]] = tensor
            for key in [key for key in self._slabs if key[0] >= len(buckets)]:
                del self._slabs[key]
        return spread

    def _target(self, bucket: int, replica: int, device: torch.device, members: Sequence[Tensor]) -> "_Slab | _Unkept":
        if not _is_plain(members[0]):
            return _Unkept(device)
        layout = _Layout.of(members, device)
        kept = self._slabs.get((bucket, replica))
        if kept is None or kept.layout != layout or not kept.is_free():
            kept = self._slabs[bucket, replica] = _Slab(layout)
        return kept

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Copies":
        """Return one without memory."""
        return Copies()

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of a bucket lie in one flat tensor; kept memory serves only the layout it was made for."""

    device: torch.device
    dtype: torch.dtype
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    """Shape, strides and offset of each tensor."""
    num_elements: int
    streams: tuple[int, ...]
    """Those of the source and of the device; [Note: kept memory]."""

    @staticmethod
    def of(members: Sequence[Tensor], device: torch.device) -> "_Layout":
        dtype, offset, places = members[0].dtype, 0, []
        alignment = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
        for tensor in members:
            places.append((tensor.shape, tensor.stride(), offset))
            offset += -(-tensor.numel() // alignment) * alignment
        streams = [
            torch.accelerator.current_stream(place).stream_id
            for place in (members[0].device, device)
            if place.type != "cpu"
        ]
        return _Layout(device=device, dtype=dtype, places=tuple(places), num_elements=offset, streams=tuple(streams))

    def views(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(shape, stride, offset) for shape, stride, offset in self.places]


@final
class _Slab:
    """Memory for one bucket of one replica."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        # Outside inference mode: autograd refuses to save what was made within.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._flat = torch.empty(layout.num_elements, dtype=layout.dtype, device=layout.device)
            self._views = layout.views(self._flat)
        self._storage = self._flat.untyped_storage()
        self._own_references = self._count_references()

    def is_free(self) -> bool:
        """Whether nobody but this slab refers to the memory; [Note: kept memory]."""
        return self._count_references() == self._own_references

    def fill(self, members: Sequence[Tensor]) -> list[Tensor]:
        """Copy the values of `members`; return them as tensors whose versions autograd counts one by one."""
        source = members[0].device
        if source == self.layout.device or len(members) == 1:
            foreach_copy_(self._views, list(members), non_blocking=self._may_overlap)
        else:  # one message instead of many
            staging = torch.empty(self.layout.num_elements, dtype=self.layout.dtype, device=source)
            foreach_copy_(self.layout.views(staging), list(members))
            self._flat.copy_(staging, non_blocking=self._may_overlap)
        return [view.data for view in self._views]

    @property
    def _may_overlap(self) -> bool:
        return self.layout.device.type != "cpu"  # a CPU would read before the values are there

    def _count_references(self) -> int:
        return storage_use_count(storage_address(self._storage))


@final
class _Unkept:
    """Stands for memory where a tensor is not a plain stretch of it: sparse, overlapping, of a class of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fill(self, members: Sequence[Tensor]) -> list[Tensor]:
        """Copy into new memory."""
        return [member.detach().to(self._device, copy=True) for member in members]


class _Spread(Function):
    """[Note: order of gradients]."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[_Slab | _Unkept], *members: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # so that what nobody used stays without a gradient
        ctx.num_members, ctx.home = len(members), members[0].device
        return _copies(targets, members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        replicas = range(0, len(grads), ctx.num_members)
        arrived = [_bring(grads[begin : begin + ctx.num_members], ctx.home) for begin in replicas]
        return None, *(_add(of_one) for of_one in zip(*arrived, strict=True))


_spread: Any = _Spread.apply


def _copies(targets: Sequence[_Slab | _Unkept], members: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return, replica after replica, each member's tensor."""
    copies = [copy for target in targets for copy in target.fill(members)]
    return *(member.detach() for member in members), *copies


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Put tensors that can travel together, neighbours first, into buckets; return their indices."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, bool], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not _is_plain(tensor):
            buckets.append([index])
            continue
        kind = (tensor.dtype, tensor.requires_grad)
        bucket, num_bytes = open_buckets.get(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        num_bytes += tensor.numel() * tensor.element_size()
        open_buckets[kind] = (bucket, num_bytes) if num_bytes < BUCKET_BYTES else ([], 0)
    return buckets


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _bring(grads: Sequence[Tensor | None], home: torch.device) -> list[Tensor | None]:
    """Return the gradients on `home`; those that come from elsewhere travel as one message."""
    away = [grad for grad in grads if grad is not None and grad.device != home]
    if len(away) < 2 or any(grad.layout != torch.strided for grad in away):  # noqa: PLR2004
        return [None if grad is None else grad.to(home) for grad in grads]
    flat = torch.cat([grad.reshape(-1) for grad in away]).to(home)
    arrived = iter(flat.split([grad.numel() for grad in away]))
    return [next(arrived).view(grad.shape) if grad is not None and grad.device != home else grad for grad in grads]


def _add(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Add in the order of the replicas; None where there is nothing to add."""
    total: Tensor | None = None
    num_added = 0
    for grad in grads:
        if grad is None:
            continue
        num_added += 1
        if total is None:
            total = grad
        elif num_added > 2 and not torch.is_grad_enabled() and total.layout == grad.layout:  # noqa: PLR2004
            total.add_(grad)  # which is ours since the first addition
        else:
            total = grad + total if total.is_sparse else total + grad  # dense + sparse is defined, sparse + dense not
    return total
