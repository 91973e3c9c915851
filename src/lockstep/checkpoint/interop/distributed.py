"""Reading folders of torch.distributed.checkpoint (DCP): `.metadata`, and chunks of tensors in `*.distcp`.

`.metadata` is a pickle, and so is each value that is not a tensor; torch unpickles them without restriction. Here
`.metadata` is read by an unpickler that allows only the dozen classes which torch writes into it, and the other values
with `weights_only=True`. torch's own reader then assembles the chunks, in this process only.
"""

import io
import math
import pathlib
import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from lockstep.checkpoint.interop.pickled import UNREADABLE
from lockstep.comm.objects import RestrictedUnpickler
from lockstep.errors import CheckpointError
from lockstep.torch_private.sharded_checkpoints import MemoryFormatEncoding, StorageInfo, get_layout

_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            *(Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, MemoryFormatEncoding),
            *(BytesStorageMetadata, ChunkStorageMetadata, StorageInfo),
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
}
"""All globals that `.metadata` may name, besides torch's dtypes."""


class DistributedCheckpoint:
    def __init__(self, metadata_file: Path) -> None:
        self.path = metadata_file.parent
        self._metadata = _read_metadata(metadata_file)
        try:
            paths = self._metadata.planner_data or {}
            self._names = {tuple(paths.get(name, (name,))): name for name in self._metadata.state_dict_metadata}
            self.structure = self._make_structure()
            """The content without values: nested dictionaries of meta tensors, and None for everything else."""
        except UNREADABLE as error:
            raise self._damage_error(error) from error

    def _make_structure(self) -> dict[Any, Any]:
        content: dict[Any, Any] = {}
        for path_keys, name in self._names.items():
            entry = self._metadata.state_dict_metadata[name]
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            _set_nested(content, path_keys, value)
        return content

    def read(self, path: tuple[str, ...], names: Collection[str]) -> dict[str, Any]:
        """Read the values under `names` in the nested dictionary at `path`."""
        heads = {(*path, name) for name in names}
        stored = {path_keys: name for path_keys, name in self._names.items() if path_keys[: len(path) + 1] in heads}
        try:
            values: dict[str, Any] = {name: self._empty_tensor(name) for name in stored.values()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: only this process reads
                load(values, storage_reader=_Reader(self.path, self._metadata), planner=_Planner(), no_dist=True)
        except CheckpointError:
            raise
        except UNREADABLE as error:
            raise self._damage_error(error) from error
        except CheckpointException as error:  # a BaseException that wraps the error of this process
            cause = error.failures[0][0]
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise self._damage_error(cause) from error
        content: dict[Any, Any] = {}
        for path_keys, name in stored.items():
            _set_nested(content, path_keys[len(path) :], values[name])
        return {name: _with_lists(value) for name, value in content.items()}

    def _damage_error(self, cause: BaseException) -> CheckpointError:
        reason = str(cause).strip().split("\n")[0] or type(cause).__name__
        return CheckpointError(
            f"{self.path} cannot be read as a folder of torch.distributed.checkpoint: {reason}. Copy the folder again, "
            "with every *.distcp file. (LS722)"
        )

    def _empty_tensor(self, name: str) -> Any:
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        # Elements that no chunk covers would keep uninitialized values.
        _check_chunks(name, entry)
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if covered != math.prod(entry.size):
            raise CheckpointError(
                f"{self.path} holds only {covered} of the {math.prod(entry.size)} elements of {name}: the chunks of a "
                "rank are missing. (LS725)"
            )
        return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Reader(FileSystemReader):
    """torch's reader, with the metadata from our restricted unpickler."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """torch's planner, which reads values that are not tensors with `weights_only=True`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} is not a tensor and needs pickle, so it was not read. Ask its author to leave it out of the "
                "checkpoint. (LS721)"
            ) from error


def _find_allowed(module: str, name: str) -> Any:
    found = _ALLOWED.get((module, name))
    if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        found = getattr(torch, name)
    return found


def _set_nested(content: dict[Any, Any], path_keys: tuple[Any, ...], value: Any) -> None:
    for key in path_keys[:-1]:
        content = content.setdefault(key, {})
    content[path_keys[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dictionaries with integer keys back into lists; DCP writes such keys only for lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    return list(inner.values()) if inner and all(isinstance(key, int) for key in inner) else inner


def _read_metadata(file_path: Path) -> Metadata:
    try:
        with file_path.open("rb") as file:
            metadata = _check_kinds(RestrictedUnpickler(file, _find_allowed, pickle.UnpicklingError).load())
    except pickle.UnpicklingError as error:
        if "." in str(error) and " " not in str(error):
            raise CheckpointError(
                f"{file_path} names {error}, which torch.distributed.checkpoint does not write there. Unpickling it "
                "could run any code, so it was not read. (LS721)"
            ) from error
        raise CheckpointError(f"{file_path} is damaged or truncated ({error}). Copy it again. (LS722)") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{file_path} is damaged or truncated ({error}). Copy it again. (LS722)") from error
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        path = file_path.with_name(name)
        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise CheckpointError(f"{path} is not a regular file. Copy the folder again. (LS722)")
    return metadata


def _check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    """Check that chunks lie within their tensor and do not overlap: they cover it if they have as many elements."""
    bounds = [
        tuple((begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in entry.chunks
        if 0 not in chunk.sizes
    ]
    if any(
        not 0 <= begin < end <= size for each in bounds for (begin, end), size in zip(each, entry.size, strict=True)
    ):
        raise ValueError(f"a chunk of {name} lies outside the tensor")
    # Sort along the dimension with the most cuts, so that few pairs of chunks have to be compared.
    most_cut = max(range(len(entry.size)), key=lambda dim: len({each[dim] for each in bounds}), default=0)
    bounds.sort(key=lambda each: each[most_cut] if each else ())
    for number, each in enumerate(bounds):
        for other in bounds[number + 1 :]:
            if each and other[most_cut][0] >= each[most_cut][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(each, other, strict=True)):
                raise ValueError(f"two chunks of {name} overlap")


def _check_kinds(metadata: Any) -> Metadata:
    """Check the types of unpickled metadata, and that all its file names are inside the folder."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise TypeError(f"{name!r} is described by a {type(entry).__name__}")
        if isinstance(entry, TensorStorageMetadata):
            sizes = [entry.size, *(chunk.sizes for chunk in entry.chunks)]
            if not isinstance(entry.properties.dtype, torch.dtype) or any(
                type(size) is not torch.Size for size in sizes
            ):
                raise TypeError(f"{name!r} has no dtype or no size")
    for info in metadata.storage_data.values():
        if info.relative_path in {"", ".", ".."} or info.relative_path != Path(info.relative_path).name:
            raise ValueError(f"it points to {info.relative_path!r}, outside its folder")
    return metadata
