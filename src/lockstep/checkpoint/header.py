"""The header of a safetensors file: where each tensor lies, and a checksum that covers the header itself. Pure.

    8 bytes      length of the JSON text, little-endian
    JSON text    {"__metadata__": {name: text}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    data         the tensors, one after the other, without a gap

safetensors guards the data with nothing and the header with nothing. Our header carries the CRC-32 of itself under
`lockstep_checksum`: of length and text, with eight zeros in the place of these eight digits. So a flipped bit in a
learning rate or in a tensor's name is noticed as one in a weight is.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""What readers of safetensors take, at most: about half a million tensors."""
CHECKSUM_KEY = "lockstep_checksum"
"""Where the header's own checksum stands in the metadata."""
EMPTY_CHECKSUM = "0" * 8
"""What stands for a checksum that is not known yet; as long as any."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_ELEMENTS = (1 << 63) - 1
_CHECKSUM_FIELD = f'"{CHECKSUM_KEY}":"'.encode()
"""Stands once in a header: within a JSON text the quotes would be escaped."""
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies in a file."""

    name: str
    """Its name."""
    dtype: torch.dtype
    """Kind of its elements."""
    shape: tuple[int, ...]
    """Its shape."""
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """Byte after the last."""

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header, read."""

    tensors: tuple[TensorInfo, ...]
    """The tensors, as they lie."""
    metadata: Mapping[str, str]
    """Text under names."""
    num_bytes: int
    """Length of the header, its first 8 bytes included: where the data begins."""
    is_intact: bool | None
    """Whether its checksum holds; None without one."""

    @property
    def file_bytes(self) -> int:
        """Length of a file with this header."""
        return self.num_bytes + max((info.end for info in self.tensors), default=0)


def assign_offsets(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[TensorInfo, ...]:
    """Place tensors, those of wide elements first, so that each begins at a multiple of its element's size.

    Raises:
        CheckpointError: A dtype that safetensors has no name for.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _DTYPES:
            raise CheckpointError(f"{dtype} is not a dtype it can hold (tensor {name!r})")
    infos: list[TensorInfo] = []
    begin = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        end = begin + dtype.itemsize * math.prod(shape)
        infos.append(TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end))
        begin = end
    return tuple(infos)


def encode_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data, with their own checksum in them.

    Raises:
        CheckpointError: It is longer than readers take.
    """
    values: dict[str, Any] = {"__metadata__": {**metadata, CHECKSUM_KEY: EMPTY_CHECKSUM}}
    for info in tensors:
        offsets = [info.begin, info.end]
        values[info.name] = {"dtype": _DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its header would take {len(text):,} bytes, and readers of safetensors take {MAX_HEADER_BYTES:,}: the "
            f"{len(tensors):,} tensors are too many for one file"
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    at = header.index(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    return header[:at] + checksum(header).encode() + header[at + len(EMPTY_CHECKSUM) :]


def header_length(start: bytes, file_bytes: int) -> int:
    """Return how long the header is that begins with these 8 bytes, themselves included.

    Raises:
        CheckpointError: It would not fit into the file, or be longer than any.
    """
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            "it does not begin as a safetensors file does, or was cut off in its header (files of torch.save and of "
            "others are for ls.load_weights and lockstep checkpoint convert)"
        )
    return _LENGTH_BYTES + length


def decode_header(header: bytes) -> Header:
    """Read a header.

    Raises:
        CheckpointError: It is not the header of a safetensors file.
    """
    try:
        values = json.loads(header[_LENGTH_BYTES:], object_pairs_hook=_reject_duplicate_names)
        metadata = values.pop("__metadata__", None) or {}
        tensors = sorted((_decode_tensor(name, value) for name, value in values.items()), key=lambda info: info.begin)
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("metadata that is not text")  # noqa: TRY301 - as every other kind of nonsense below
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its header is not that of a safetensors file ({error!r})") from error
    end = 0
    for info in tensors:
        if info.begin != end or info.num_bytes != info.dtype.itemsize * _num_elements(info.shape):
            raise CheckpointError(f"its header contradicts itself about the place of {info.name!r}")
        end = info.end
    is_intact = None if CHECKSUM_KEY not in metadata else _header_checksum(header) == metadata[CHECKSUM_KEY]
    return Header(tensors=tuple(tensors), metadata=metadata, num_bytes=len(header), is_intact=is_intact)


def checksum(data: bytes | memoryview, initial: str = EMPTY_CHECKSUM) -> str:
    """Return the CRC-32 of bytes that follow those of checksum `before`, as 8 hex digits."""
    return f"{zlib.crc32(data, int(initial, 16)):08x}"


def _header_checksum(header: bytes) -> str:
    at = header.find(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    return checksum(header[:at] + EMPTY_CHECKSUM.encode() + header[at + len(EMPTY_CHECKSUM) :])


def _reject_duplicate_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse what readers would understand differently, some taking the first and some the last."""
    values = dict(items)
    if len(values) < len(items):
        raise ValueError("a name that stands twice")
    return values


def _num_elements(shape: Sequence[int]) -> int:
    """Return their number; -1 for more than any tensor has, whose exact number could take hours to compute."""
    product = 1
    for size in filter(None, shape):
        product *= size
        if product > _MAX_ELEMENTS:
            return -1
    return 0 if 0 in shape else product


def _decode_tensor(name: str, value: Mapping[str, Any]) -> TensorInfo:
    name.encode()  # half a surrogate pair is no text
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name!r} has a size or place that is not a whole number")
    return TensorInfo(name=name, dtype=_BY_NAME[value["dtype"]], shape=shape, begin=begin, end=end)
