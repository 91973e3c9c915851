"""The header of a safetensors file: the offsets of the tensors, and a checksum of the header itself. Pure.

    8 bytes      length of the JSON text, little-endian
    JSON text    {"__metadata__": {name: text}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    data         the tensors, one after the other, without a gap

The safetensors format has no checksums. Our header contains its own CRC-32 under `lockstep_checksum`. It is computed
over the length and the text, with `00000000` in place of its own eight hex digits. So a flipped bit in the header, for
example in a learning rate or in a tensor's name, is detected too.
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
"""Limit of the safetensors library; enough for about half a million tensors."""
CHECKSUM_KEY = "lockstep_checksum"
EMPTY_CHECKSUM = "0" * 8
"""CRC-32 of no bytes: the initial value of a checksum, and a placeholder of the right length."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_ELEMENTS = (1 << 63) - 1
_CHECKSUM_FIELD = f'"{CHECKSUM_KEY}":"'.encode()
"""Occurs once in a header: inside a JSON string its quotes would be escaped."""
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
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte, counted from the end of the header."""
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    num_bytes: int
    """Length of the header with its first 8 bytes; the data begin there."""
    is_intact: bool | None
    """Whether its checksum is right; None if it has no checksum."""

    @property
    def file_bytes(self) -> int:
        return self.num_bytes + max((info.end for info in self.tensors), default=0)


def assign_offsets(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[TensorInfo, ...]:
    """Assign each tensor its offsets; tensors with the widest elements come first, so that all are aligned."""
    for name, (dtype, _) in tensors.items():
        if dtype not in _DTYPES:
            raise CheckpointError(f"the tensor {name!r} is {dtype}, which the safetensors format cannot hold")
    infos: list[TensorInfo] = []
    begin = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        end = begin + dtype.itemsize * math.prod(shape)
        infos.append(TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end))
        begin = end
    return tuple(infos)


def encode_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    values: dict[str, Any] = {"__metadata__": {**metadata, CHECKSUM_KEY: EMPTY_CHECKSUM}}
    for info in tensors:
        offsets = [info.begin, info.end]
        values[info.name] = {"dtype": _DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its header would have {len(text):,} bytes, but readers of safetensors accept at most "
            f"{MAX_HEADER_BYTES:,}: {len(tensors):,} tensors are too many for one file"
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    at = header.index(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    return header[:at] + checksum(header).encode() + header[at + len(EMPTY_CHECKSUM) :]


def header_length(start: bytes, file_bytes: int) -> int:
    """Return the length of the header that begins with these 8 bytes, including them."""
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            "it does not begin with a safetensors header, or the header is truncated (to read files of torch.save and "
            "other formats, use ls.load_weights or lockstep checkpoint convert)"
        )
    return _LENGTH_BYTES + length


def decode_header(header: bytes) -> Header:
    try:
        values = json.loads(header[_LENGTH_BYTES:], object_pairs_hook=_reject_duplicate_names)
        metadata = values.pop("__metadata__", None) or {}
        tensors = sorted((_decode_tensor(name, value) for name, value in values.items()), key=lambda info: info.begin)
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("metadata that is not text")  # noqa: TRY301 - one handler for all errors
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its header is not a safetensors header ({error!r})") from error
    end = 0
    for info in tensors:
        if info.begin != end or info.num_bytes != info.dtype.itemsize * _num_elements(info.shape):
            raise CheckpointError(f"the offsets of {info.name!r} in its header do not match the tensor's size")
        end = info.end
    is_intact = None if CHECKSUM_KEY not in metadata else _header_checksum(header) == metadata[CHECKSUM_KEY]
    return Header(tensors=tuple(tensors), metadata=metadata, num_bytes=len(header), is_intact=is_intact)


def checksum(data: bytes | memoryview, initial: str = EMPTY_CHECKSUM) -> str:
    """Return the CRC-32 as 8 hex digits; `initial` is the checksum of the bytes before `data`."""
    return f"{zlib.crc32(data, int(initial, 16)):08x}"


def _header_checksum(header: bytes) -> str:
    at = header.find(_CHECKSUM_FIELD) + len(_CHECKSUM_FIELD)
    return checksum(header[:at] + EMPTY_CHECKSUM.encode() + header[at + len(EMPTY_CHECKSUM) :])


def _reject_duplicate_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise for a name that occurs twice: some readers would use the first value and some the last."""
    values = dict(items)
    if len(values) < len(items):
        raise ValueError("a name that occurs twice")
    return values


def _num_elements(shape: Sequence[int]) -> int:
    """Return the number of elements; -1 for too many: the exact product of a malicious shape could take hours."""
    product = 1
    for size in filter(None, shape):
        product *= size
        if product > _MAX_ELEMENTS:
            return -1
    return 0 if 0 in shape else product


def _decode_tensor(name: str, value: Mapping[str, Any]) -> TensorInfo:
    name.encode()  # raises for half of a surrogate pair
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name!r} has a size or an offset that is not a whole number")
    return TensorInfo(name=name, dtype=_BY_NAME[value["dtype"]], shape=shape, begin=begin, end=end)
