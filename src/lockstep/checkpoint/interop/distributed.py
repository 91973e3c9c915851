"""Reading folders of torch.distributed.checkpoint: `.metadata`, and the tensors' pieces in `*.distcp`.

`.metadata` is a pickle, and torch reads it as one; so is each value that is no tensor. Here the first is read by an
unpickler that knows the dozen classes which torch writes into it and nothing else, the others with
`weights_only=True`. torch's own reader then puts the pieces together, in this process alone.
"""

import io
import math
import pathlib
import pickle
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

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

from lockstep.checkpoint.interop.folders import METADATA_NAME
from lockstep.checkpoint.interop.pickled import UNREADABLE
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
"""All that `.metadata` may name, beside torch's dtypes."""


class DistributedCheckpoint:
    """A folder of torch.distributed.checkpoint, of which parts are read.

    Args:
        path: The folder.

    Raises:
        CheckpointError: `.metadata` is damaged, names what it should not, or speaks of files elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = _read_metadata(path)
        try:
            paths = self._metadata.planner_data or {}
            self._names = {tuple(paths.get(name, (name,))): name for name in self._metadata.state_dict_metadata}
            self.structure = self._make_structure()
            """The content without values: nested dictionaries with meta tensors, and None for all else."""
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
        """Read the values under `names` in the dictionary that `path` leads to.

        Raises:
            CheckpointError: A file is missing or damaged, or a value needs pickle.
        """
        heads = {(*path, name) for name in names}
        stored = {path_keys: name for path_keys, name in self._names.items() if path_keys[: len(path) + 1] in heads}
        try:
            values: dict[str, Any] = {name: self._empty_tensor(name) for name in stored.values()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: no other rank reads
                load(values, storage_reader=_Reader(self.path, self._metadata), planner=_Planner(), no_dist=True)
        except CheckpointError:
            raise
        except UNREADABLE as error:
            raise self._damage_error(error) from error
        except CheckpointException as error:  # no Exception; it wraps what this process raised while reading
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
            f"{self.path} cannot be read as a folder of torch.distributed.checkpoint: {reason}. Copy it again, with "
            "every *.distcp file."
        )

    def _empty_tensor(self, name: str) -> Any:
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        # What no piece covers would keep whatever the memory held.
        _check_chunks(name, entry)
        covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if covered != math.prod(entry.size):
            raise CheckpointError(
                f"{self.path} holds {covered} of the {math.prod(entry.size)} numbers of {name}: a rank's part "
                "is missing."
            )
        return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Reader(FileSystemReader):
    """torch's reader, with metadata that was read safely."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """torch's planner, reading what is no tensor without pickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} is no tensor and needs pickle, so it was not read. Its owner can leave it out of "
                "the checkpoint."
            ) from error


class _MetadataUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in C leaves nothing to override but names
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def load_build(self) -> None:
        """Refuse to set attributes of what is no instance: those of a class or a function are everybody's."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type | FunctionType | Enum):
            raise pickle.UnpicklingError(f"{target.__module__}.{getattr(target, '__qualname__', target)}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


def _set_nested(content: dict[Any, Any], path_keys: tuple[Any, ...], value: Any) -> None:
    for key in path_keys[:-1]:
        content = content.setdefault(key, {})
    content[path_keys[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dictionaries with numbers for keys into the lists that they were: no others have them there."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    return list(inner.values()) if inner and all(isinstance(key, int) for key in inner) else inner


def _read_metadata(path: Path) -> Metadata:
    file_path = path / METADATA_NAME
    try:
        with file_path.open("rb") as file:
            metadata = _check_kinds(_MetadataUnpickler(file).load())
    except pickle.UnpicklingError as error:
        if "." in str(error) and " " not in str(error):
            raise CheckpointError(
                f"{file_path} names {error}, which torch.distributed.checkpoint does not write there. Reading it could "
                "run any code, so it was not read."
            ) from error
        raise CheckpointError(f"{file_path} is damaged or truncated ({error}). Copy it again.") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{file_path} is damaged or truncated ({error}). Copy it again.") from error
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if (path / name).exists() and not (path / name).is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path / name} is no file. Copy the folder again.")
    return metadata


def _check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    """Check that a tensor's pieces lie within it and not over each other, so that as many numbers as it has fill it.

    Raises:
        ValueError: They do not.
    """
    bounds = [
        tuple((begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in entry.chunks
        if 0 not in chunk.sizes
    ]
    if any(
        not 0 <= begin < end <= size for each in bounds for (begin, end), size in zip(each, entry.size, strict=True)
    ):
        raise ValueError(f"a piece of {name} lies outside it")
    # Along the dimension that was cut most often, few pieces are beside each other.
    most_cut = max(range(len(entry.size)), key=lambda dim: len({each[dim] for each in bounds}), default=0)
    bounds.sort(key=lambda each: each[most_cut] if each else ())
    for number, each in enumerate(bounds):
        for other in bounds[number + 1 :]:
            if each and other[most_cut][0] >= each[most_cut][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(each, other, strict=True)):
                raise ValueError(f"two pieces of {name} lie over each other")


def _check_kinds(metadata: Any) -> Metadata:
    """Check that unpickled metadata is of the right kinds and stays in its folder."""
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
