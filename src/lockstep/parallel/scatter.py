"""Cut a call's arguments into one part per replica, and join the replicas' outputs again.

What torch's scatter and gather do, without losing samples: `zip` over tensors that fall into different numbers of
chunks drops the last ones there, and a `None` from replica 0 drops what the others returned.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence


def scatter_arguments(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Cut every tensor in `inputs` and `kwargs` along `dim`; return positional and named arguments per replica.

    Tensors are cut as `torch.chunk` cuts, so a short batch has fewer parts than there are devices. Other objects go
    to each replica by reference. Without any tensor there is nothing to divide: one part, for the first device.

    Raises:
        TypeError: A packed sequence, which cannot be cut along samples.
        ValueError: A tensor without `dim`, or tensors that fall into different numbers of parts.
    """
    chunks: dict[int, tuple[Tensor, ...]] = {}

    def cut(tensor: Tensor) -> Tensor:
        chunks[id(tensor)] = _cut(tensor, len(devices), dim)
        return tensor

    map_tensors(cut, (inputs, kwargs))
    counts = {len(parts): parts for parts in chunks.values()}
    if len(counts) > 1:
        sizes = " and ".join(str(sum(part.size(dim) for part in parts)) for parts in counts.values())
        raise ValueError(
            f"Tensors of sizes {sizes} along dim {dim} fall into {' and '.join(map(str, counts))} parts for "
            f"{len(devices)} replicas, so samples would be lost. Give all tensors the same size along dim {dim}; "
            "expand one that all samples share, or keep it as a buffer of the module."
        )
    count = next(iter(counts), 1)
    parts = [_take(chunks, number, device, (inputs, kwargs)) for number, device in enumerate(devices[:count])]
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `change` applied to every tensor in nested tuples, named tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        raise TypeError(
            "A PackedSequence cannot be cut into one part per replica. Pass the padded tensor and the lengths, "
            "and pack within the module's forward."
        )
    if isinstance(value, tuple):
        build = getattr(type(value), "_make", tuple)  # a named tuple is built by its own _make
        return build(map_tensors(change, item) for item in value)
    if isinstance(value, list):
        return [map_tensors(change, item) for item in value]
    if isinstance(value, MutableMapping):
        return _rebuild(value, {key: map_tensors(change, item) for key, item in value.items()})
    return value


def join_outputs(outputs: Sequence[Any], device: torch.device, dim: int, path: str = "output") -> Any:
    """Join the outputs of the replicas, in their order, into one of the same structure on `device`.

    Tensors are concatenated along `dim`; scalars become a vector with one element per replica.

    Args:
        outputs: One per replica, of one structure.
        device: Where the result lies.
        dim: Along which tensors were cut.
        path: What messages call the outputs.

    Raises:
        RuntimeError: Tensors whose shapes differ in more than `dim`.
        TypeError: Replicas returned different kinds of things, or something that cannot be joined.
        ValueError: Containers of different lengths or keys.
    """
    first = outputs[0]
    kinds = list(dict.fromkeys(Tensor if isinstance(output, Tensor) else type(output) for output in outputs))
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"Replicas returned {names} at {path}; they must all return the same kind of value.")
    if isinstance(first, Tensor):
        return _concatenate(outputs, device, dim, path)
    if first is None:
        return None
    if isinstance(first, Mapping):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError(f"All dicts must have the same number of keys, and the same ones, at {path}.")
        items = {key: join_outputs([o[key] for o in outputs], device, dim, f"{path}[{key!r}]") for key in first}
        return _rebuild(first, items)
    if isinstance(first, tuple | list):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError(f"Replicas returned {[len(o) for o in outputs]} values at {path}, expected equally many.")
        joined = [join_outputs(o, device, dim, f"{path}[{i}]") for i, o in enumerate(zip(*outputs, strict=True))]
        return getattr(type(first), "_make", type(first))(joined)
    raise TypeError(
        f"A replica returned {type(first).__name__} at {path}, which cannot be joined. Return tensors, None, or "
        "tuples, lists and dicts of such; or set gather_output=False and take one output per replica."
    )


class _Concatenate(Function):
    """Concatenate tensors of several devices on one, without a second copy of them there."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: Tensor) -> Tensor:
        """Copy each tensor straight into its place."""
        sizes = [tensor.size(dim) for tensor in tensors]
        ctx.dim, ctx.sizes, ctx.devices = dim, sizes, [tensor.device for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(sizes)
        joined = torch.empty(shape, dtype=tensors[0].dtype, device=device)
        for place, tensor in zip(joined.split(sizes, dim), tensors, strict=True):
            place.copy_(tensor, non_blocking=device.type != "cpu")
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send each its part of the gradient."""
        parts = grads[0].split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(device) for part, device in zip(parts, ctx.devices, strict=True))


_move_and_concatenate: Any = _Concatenate.apply


def _cut(tensor: Tensor, num_parts: int, dim: int) -> tuple[Tensor, ...]:
    if tensor.dim() == 0 or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} among the inputs has no dim {dim} along which to cut the batch. "
            "Pass a number instead of a tensor without samples, or choose another dim."
        )
    return tensor.chunk(num_parts, dim)


def _take(chunks: dict[int, tuple[Tensor, ...]], number: int, device: torch.device, arguments: Any) -> Any:
    # To the CPU, a copy that does not block may be read before it is there.
    return map_tensors(
        lambda tensor: chunks[id(tensor)][number].to(device, non_blocking=device.type != "cpu"), arguments
    )


def _rebuild(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `like` with other values."""
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    if isinstance(like, dict):
        return type(like)(items)
    rebuilt: Any = copy.copy(like)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors) and dim == 0:
        tensors = [tensor.view(1) for tensor in tensors]
    if tensors[0].dim() == 0 or not -tensors[0].dim() <= dim < tensors[0].dim():
        raise RuntimeError(
            f"Replicas returned tensors of shape {tuple(tensors[0].shape)} at {path}, without a dim {dim} along which "
            "to join them. Return one with a batch dimension there, or set gather_output=False."
        )
    rests = {(tensor.dim(), *_without(tensor, dim)) for tensor in tensors}
    if len(rests) > 1:
        raise RuntimeError(
            f"Replicas returned tensors of shapes {[tuple(tensor.shape) for tensor in tensors]} at {path}; joining "
            f"them along dim {dim} needs equal sizes elsewhere. Pad them to one size, for instance with "
            "pad_packed_sequence(..., total_length=...), or set gather_output=False."
        )
    kinds = {(tensor.dtype, tensor.layout) for tensor in tensors}
    if any(tensor.device != device for tensor in tensors) and len(kinds) == 1 and tensors[0].layout == torch.strided:
        joined: Tensor = _move_and_concatenate(device, dim, *tensors)
        return joined
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    sizes = list(tensor.shape)
    sizes[dim : dim + 1 or None] = []
    return tuple(sizes)
