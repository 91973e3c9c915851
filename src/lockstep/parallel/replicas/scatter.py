"""Split a call's arguments into one part per replica, and concatenate the replicas' outputs.

Like torch's scatter and gather, but no samples are lost: with torch, `zip` over tensors that split into different
numbers of chunks drops the last chunks, and a `None` from replica 0 drops the outputs of the other replicas. Nor are
samples paired wrongly: 9 and 8 samples on two devices are chunks of 5 and 4, and of 4 and 4.
"""

import copy
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence

_Selector = Callable[[int], Any]
"""Returns the part of one value for the replica with the given number."""


def scatter_arguments(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Split every tensor in `inputs` and `kwargs` along `dim`; return positional and named arguments per replica.

    Tensors in tuples, lists and mappings are split by `torch.chunk`, so a short batch has fewer parts than there are
    devices. A mapping whose class cannot be constructed from a dict, and all other objects, go to each replica by
    reference. If there is no tensor, there is one part, for the first device. With one device nothing is
    split, only moved.
    """
    splitter = _Splitter(devices, dim)
    select = _make_selector((inputs, kwargs), splitter)
    parts = [select(number) for number in range(splitter.num_parts())]
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


@final
@dataclass(frozen=True, slots=True)
class _Splitter:
    """Split tensors; a tensor that occurs several times is split once."""

    devices: Sequence[torch.device]
    dim: int
    done: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    """By `id`. The tensor is kept here, so that its id is not reused."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        if id(tensor) not in self.done:
            self.done[id(tensor)] = (tensor, self._split(tensor))
        return self.done[id(tensor)][1]

    def num_parts(self) -> int:
        counts = {len(parts): tensor for tensor, parts in self.done.values()}
        if len(counts) > 1:
            sizes = self._sizes_of(counts.values())
            raise ValueError(
                f"Tensors of sizes {sizes} along dim {self.dim} split into {' and '.join(map(str, counts))} parts for "
                f"{len(self.devices)} replicas, so samples would be lost. Pass tensors of the same size along dim "
                f"{self.dim}; expand one that all samples share, or keep it as a buffer of the module. (LS352)"
            )
        if len(self.devices) > 1:
            self._check_pairs()
        return next(iter(counts), 1)

    def _check_pairs(self) -> None:
        """Refuse tensors that are cut at other places of the batch: 16 rows beside 8 samples may be two of each."""
        sizes = {tuple(part.size(self.dim) for part in parts): tensor for tensor, parts in self.done.values()}
        ratios = {tuple(size // gcd(*each) for size in each): each for each in sizes if any(each)}
        if len(ratios) > 1:
            parts = " and ".join(", ".join(map(str, each)) for each in ratios.values())
            raise ValueError(
                f"Tensors of sizes {self._sizes_of(sizes[each] for each in ratios.values())} along dim {self.dim} "
                f"split into parts of {parts} for {len(self.devices)} replicas, so samples of one would be paired "
                f"with others of another. Pass tensors of the same size along dim {self.dim}. (LS352)"
            )

    def _sizes_of(self, tensors: Iterable[Tensor]) -> str:
        return " and ".join(str(tensor.size(self.dim)) for tensor in tensors)

    def _split(self, tensor: Tensor) -> list[Tensor]:
        if len(self.devices) == 1:
            return [_move(tensor, self.devices[0])]
        if tensor.dim() == 0 or not -tensor.dim() <= self.dim < tensor.dim():
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} among the inputs has no dim {self.dim} along which to split "
                "the batch. Pass a number instead of a tensor without samples, or choose another dim. (LS352)"
            )
        chunks = tensor.chunk(len(self.devices), self.dim)
        return [_part(part, device) for part, device in zip(chunks, self.devices[: len(chunks)], strict=True)]


def _part(part: Tensor, device: torch.device) -> Tensor:
    # All chunks of a tensor share one version counter. A replica that writes in place, like ReLU(inplace=True),
    # would make the chunks of other replicas unusable for backward.
    return part.clone() if part.device == device and torch.is_grad_enabled() else _move(part, device)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    # A non-blocking copy to the CPU may be read before it has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _make_selector(value: Any, splitter: _Splitter) -> _Selector:
    """Split the tensors in a value; a mapping is iterated over only once, because it may create its values lazily."""
    if isinstance(value, Tensor):
        return splitter.split(value).__getitem__
    if isinstance(value, PackedSequence):
        raise TypeError(
            "A PackedSequence cannot be split into one part per replica. Pass the padded tensor and the lengths, "
            "and pack within the module's forward. (LS352)"
        )
    if isinstance(value, tuple | list):
        selectors = [_make_selector(item, splitter) for item in value]
        # A named tuple is built by its own _make.
        build: Any = list if isinstance(value, list) else getattr(type(value), "_make", tuple)
        return lambda number: build(select(number) for select in selectors)
    if isinstance(value, Mapping):
        items = dict(value.items())
        if _rebuilt(value, items) is not None:
            by_key = {key: _make_selector(item, splitter) for key, item in items.items()}
            return lambda number: _rebuilt(value, {key: select(number) for key, select in by_key.items()})
    return lambda _number: value


def join_outputs(outputs: Sequence[Any], device: torch.device, dim: int, path: str = "output") -> Any:
    """Join outputs in the order of replicas: tensors along `dim`, scalars to a vector with one element per replica."""
    first = outputs[0]
    kinds = list(dict.fromkeys(Tensor if isinstance(output, Tensor) else type(output) for output in outputs))
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"Replicas returned {names} at {path}; they must all return the same kind of value. (LS353)")
    if isinstance(first, Tensor):
        return _concatenate(outputs, device, dim, path)
    if first is None:
        return None
    if isinstance(first, Mapping):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError(f"All dicts must have the same number of keys, and the same ones, at {path}. (LS353)")
        items = {key: join_outputs([o[key] for o in outputs], device, dim, f"{path}[{key!r}]") for key in first}
        if (joined := _rebuilt(first, items)) is not None:
            return joined
    if isinstance(first, tuple | list):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError(
                f"Replicas returned {[len(o) for o in outputs]} values at {path}, expected equally many. (LS353)"
            )
        values = [join_outputs(o, device, dim, f"{path}[{i}]") for i, o in enumerate(zip(*outputs, strict=True))]
        return getattr(type(first), "_make", type(first))(values)
    raise TypeError(
        f"A replica returned {type(first).__name__} at {path}, which cannot be joined. Return tensors, None, or "
        "tuples, lists and dicts of such; or set gather_output=False and take one output per replica. (LS353)"
    )


class _Concatenate(Function):
    """Concatenate tensors of several devices on one device, without an extra copy on it."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: Tensor) -> Tensor:
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
        parts = grads[0].split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(device) for part, device in zip(parts, ctx.devices, strict=True))


_move_and_concatenate: Any = _Concatenate.apply


def _rebuilt(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `like` with other values; None if it cannot be constructed."""
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    if isinstance(like, dict):
        return type(like)(items)
    if isinstance(like, UserDict):
        rebuilt: Any = copy.copy(like)  # keeps its other attributes
        rebuilt.data = items
        return rebuilt
    try:
        rebuilt = type(like)(items)
        return rebuilt if rebuilt.keys() == items.keys() else None
    except Exception:  # noqa: BLE001 - a constructor with other parameters may raise anything
        return None


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors) and dim == 0:
        tensors = [tensor.view(1) for tensor in tensors]
    if tensors[0].dim() == 0 or not -tensors[0].dim() <= dim < tensors[0].dim():
        raise RuntimeError(
            f"Replicas returned tensors of shape {tuple(tensors[0].shape)} at {path}, without a dim {dim} along which "
            "to join them. Return one with a batch dimension there, or set gather_output=False. (LS353)"
        )
    rests = {(tensor.dim(), *_without(tensor, dim)) for tensor in tensors}
    if len(rests) > 1:
        raise RuntimeError(
            f"Replicas returned tensors of shapes {[tuple(tensor.shape) for tensor in tensors]} at {path}; joining "
            f"them along dim {dim} needs equal sizes elsewhere. Pad them to one size, for instance with "
            "pad_packed_sequence(..., total_length=...), or set gather_output=False. (LS353)"
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
