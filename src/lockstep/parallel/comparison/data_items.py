"""What a data set holds, as far as it can be seen without reading a sample: that may be slow, or change something.

A DistributedSampler gives each rank indices, so index 7 must be the same sample on every rank. It is not where files
were listed in another order (`os.listdir`, a set), or where each rank has split the data with a seed of its own.

Left out is what may differ between ranks that do as they should: the folder of files, which may be one of each rank or
host; options, among them a rank; tensors that were written to, as the last loss of each sample; what a sampler that is
made into a data set has drawn.
"""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

from lockstep.torch_private.modules import version_of

_MOST_SEEN: Final = 256
_MOST_NUMBERS: Final = 1 << 14
_LONGEST_TEXT: Final = 200
_DEPTH: Final = 3
"""So many data sets within one another are looked at: a part of a part of the data."""
_PLAIN: Final = (str, int, float, PurePath)


def describe_items(dataset: object) -> dict[str, str]:
    """Return in words the lists of a data set that have an item per sample, and its names of classes (local)."""
    return dict(_describe(dataset, "data", _DEPTH))


def _describe(dataset: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if not isinstance(dataset, Sized) or depth == 0:
        return
    try:
        num_samples = len(dataset)
    except Exception:  # noqa: BLE001 - the user's own, of a data set within another that may never be asked
        return
    attributes = dict(getattr(dataset, "__dict__", {}))
    if isinstance(dataset, TensorDataset):
        values = {f"tensors[{index}]": tensor for index, tensor in enumerate(dataset.tensors)}
    elif any(issubclass(type(value), Sampler) for value in attributes.values()):
        values = {}
    else:
        values = {key: value for key, value in attributes.items() if not _was_written(value)}
    for key, value in values.items():
        text = _describe_value(value, num_samples)
        if text:
            yield f"{name}.{key}", text
    inner = attributes.get("dataset")
    if inner is not None:
        yield from _describe(inner, f"{name}.dataset", depth - 1)


def _was_written(value: object) -> bool:
    return type(value) is Tensor and not value.is_inference() and version_of(value) > 0


def _describe_value(value: Any, num_samples: int) -> str:
    if type(value) is Tensor:
        is_plain = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
        fits = is_plain and value.dim() > 0 and len(value) == num_samples
        return f"a tensor of {tuple(value.shape)} with number {_number_of_rows(value)}" if fits else ""
    if type(value) is dict and len(value) <= _MOST_SEEN:
        numbers = _numbers_classes(value)
        return f"{_shorten(repr(value))} with number {_number(list(value.items()))}" if numbers else ""
    if type(value) not in {list, tuple} or len(value) != num_samples or not value:
        return ""
    seen = value[:: max(1, num_samples // _MOST_SEEN)]
    if not all(map(_is_plain, seen)):
        return ""
    seen = _without_folder(seen)
    return f"{num_samples} items, {_shorten(repr(seen[0]))} the first, with number {_number(seen)}"


def _numbers_classes(value: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary gives names to the numbers from 0 on, or numbers to names."""
    plain = all(type(each) is str or type(each) is int for pair in value.items() for each in pair)
    wanted = set(range(len(value)))
    return plain and len(value) > 1 and (value.keys() == wanted or set(value.values()) == wanted)


def _without_folder(items: Sequence[Any]) -> list[Any]:
    """Return items without the folder that all paths among them have in common."""
    parts = chain.from_iterable(each if type(each) is tuple else (each,) for each in items)
    paths = [str(each) for each in parts if isinstance(each, PurePath) or (type(each) is str and os.sep in each)]
    folder, separator, _ = os.path.commonprefix(paths).rpartition(os.sep)  # noqa: RUF071 - up to its last separator
    return [_cut(each, folder + separator) for each in items] if separator else list(items)


def _cut(item: Any, folder: str) -> Any:
    if type(item) is tuple:
        return tuple(_cut(each, folder) for each in item)
    is_within = isinstance(item, str | PurePath) and str(item).startswith(folder)
    return type(item)(str(item)[len(folder) :]) if is_within else item


def _is_plain(item: Any) -> bool:
    if type(item) is tuple:
        return all(isinstance(each, _PLAIN) for each in item)
    return isinstance(item, _PLAIN)


def _number(items: Sequence[Any]) -> int:
    return zlib.crc32(repr(items).encode())


def _number_of_rows(tensor: Tensor) -> int:
    seen = tensor.detach()[:: max(1, len(tensor) // _MOST_SEEN)].reshape(-1)
    return zlib.crc32(seen[:: max(1, seen.numel() // _MOST_NUMBERS)].contiguous().view(torch.uint8).numpy().tobytes())


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def number_items(described: Mapping[str, str]) -> int:
    """Return a number for what `describe_items` has returned, the same in every process (pure)."""
    return zlib.crc32(repr(sorted(described.items())).encode())
