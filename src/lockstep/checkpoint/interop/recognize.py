"""Recognising the format of a file or folder by its content, and reading the weights in it.

File names are ambiguous: Lightning, TensorFlow and Lockstep all use `.ckpt`. So the first bytes decide. Everything is
read to the CPU: `torch.save` stores each tensor's device, which may belong to another worker here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint.file import load_checkpoint
from lockstep.checkpoint.interop.locate import find_weights, split_extra
from lockstep.checkpoint.interop.pickled import LEGACY_MAGIC, read_archive, refuse_pickle
from lockstep.checkpoint.manifest import decode_state
from lockstep.checkpoint.step_files import MANIFEST_KEY, find_last_by_name
from lockstep.errors import CheckpointError

METADATA_NAME = ".metadata"
"""The file that every folder of torch.distributed.checkpoint contains."""
_INDEX_SUFFIX = ".index.json"
"""Suffix of the file that maps each tensor to its shard file."""
_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
_USUAL_FILES = tuple(f"{stem}{suffix}" for suffix in (".safetensors", ".bin") for stem in _STEMS)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_SHOWN = 6
_SIGNATURE_BYTES = 512
_TAR_NAME_AT = 257
_SHARDING_KEY = "DCP_SHARDING_INFO"
_LIGHTNING_KEY = "pytorch-lightning_version"
_SAVE_AGAIN = "with a current torch, torch.save(torch.load(FILE, weights_only=True), 'weights.pt')"
_OTHER_FORMATS = (
    (LEGACY_MAGIC, f"a file of torch.save before torch 1.6, which is not a zip archive: {_SAVE_AGAIN}"),
    (b"version https://git-lfs", "a git-lfs pointer: fetch the file itself with git lfs pull"),
    (b"\x1f\x8b", "compressed with gzip: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it"),
    (b"\x89HDF", "an HDF5 file, as Keras writes: only its own library reads it"),
    (b"\x93NUMPY", "a single array of NumPy without a name: save a dictionary of tensors with torch.save"),
    (b"GGUF", "a GGUF file of llama.cpp: convert it to safetensors first"),
)
"""First bytes of other formats, with what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignWeights:
    """The weights of a file or folder, on the CPU."""

    tensors: Mapping[str, Tensor]
    """By the names in the file, without the prefix that `key` selected."""
    extra: Mapping[str, Any]
    """Extra state of modules that is not a tensor, by name."""
    versions: Mapping[str, Any]
    """By module path, the version that wrote it (a state_dict's `_metadata`); empty if the file has none."""
    form: str
    notes: tuple[str, ...]
    """What was left out, in words."""


class _Content(NamedTuple):
    value: Any
    form: str


def read_weights(path: Path, key: str | None = None) -> ForeignWeights:
    """Read the weights at `path` to the CPU, in any known format; runs no code from them (local)."""
    folder = None
    try:
        if (path / METADATA_NAME).is_file():
            from lockstep.checkpoint.interop.distributed import DistributedCheckpoint  # deferred: it imports a lot

            folder = DistributedCheckpoint(path / METADATA_NAME)
            content = _Content(folder.structure, "a folder of torch.distributed.checkpoint")
        else:
            content = _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. (LS720)") from error
    try:
        found = find_weights(content.value, str(path), key)
    except TypeError as error:  # a pickle can set attributes of a dictionary, such as `items`
        raise CheckpointError(f"{path} holds a dictionary with overwritten methods: {error}. (LS721)") from error
    state = found.state
    if folder is not None:
        values = folder.read(found.path, [f"{found.prefix}{name}" for name in state])
        state = {name.removeprefix(found.prefix): value for name, value in values.items()}
    tensors, extra, rest = split_extra(state)
    unfilled = [name for name, tensor in tensors.items() if tensor.is_meta]
    if unfilled:
        raise CheckpointError(
            f"The weights contain {len(unfilled)} tensors on the meta device, for example {unfilled[0]}, which have no "
            "values. Save them again from a model whose tensors have values. (LS724)"
        )
    nested = [name for name, tensor in tensors.items() if tensor.is_nested]
    if nested:
        raise CheckpointError(
            f"The weights contain {len(nested)} nested tensors, for example {nested[0]}, which have no shape. (LS724)"
        )
    notes = [f"only names under {found.prefix!r}"] if found.prefix else []
    if found.others:
        notes.append(f"other weights in the file, left out: {', '.join(map(repr, found.others))}")
    if rest:
        notes.append(f"left out, because they are not tensors: {', '.join(rest)}")
    is_wrapped = found.path and not content.form.startswith("a Lightning")
    wrapped = f" wrapped in {'.'.join(found.path)!r}" if is_wrapped else ""
    return ForeignWeights(
        tensors=tensors,
        extra=extra,
        versions=_versions(state),
        form=f"{content.form}{wrapped}",
        notes=tuple(notes),
    )


def _versions(state: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = getattr(state, "_metadata", None)
    named = versions.items() if isinstance(versions, Mapping) else ()
    return {path: version for path, version in named if isinstance(path, str) and isinstance(version, Mapping)}


def _read_folder(path: Path) -> _Content:
    last = find_last_by_name(path)
    if last is not None:
        content = _read_file(last)
        return content._replace(form=f"{content.form}, {last.name}, the newest in a run directory")
    name, weight_map = _find_weight_files(path)
    if weight_map is None:
        content = _read_file(path / name)
        return content._replace(form=f"{content.form}, {name} in a folder")
    merged: dict[str, Any] = {}
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        state = find_weights(_read_file(path / shard).value, str(path / shard)).state
        twice = sorted(merged.keys() & state.keys())
        if twice:
            raise CheckpointError(
                f"{path} holds {twice[0]} in {shard} and in another shard. Keep one set of shards. (LS725)"
            )
        merged.update(state)
    absent = [tensor for tensor in weight_map if tensor not in merged]
    if absent:
        raise CheckpointError(
            f"{path / name} names {len(absent)} tensors that are not in its shards, for example {absent[0]}. Download "
            "the shards and the index again, from one version. (LS725)"
        )
    return _Content(value=merged, form=f"{len(shards)} shards of {name.removesuffix(_INDEX_SUFFIX)}")


def _find_weight_files(folder: Path) -> tuple[str, Mapping[str, str] | None]:
    """Return the name of a folder's weight file and None, or the name of its index and the index's weight map.

    An index is preferred to a single file, and safetensors to pickles, as in the Hugging Face libraries.
    """
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in _USUAL_FILES:
        if f"{name}{_INDEX_SUFFIX}" in files:
            return f"{name}{_INDEX_SUFFIX}", _read_index(folder / f"{name}{_INDEX_SUFFIX}")
        if name in files:
            return name, None
    others = [name for name in files if name.endswith(_SUFFIXES)]
    if len(others) == 1:
        return others[0], None
    if others:
        raise CheckpointError(
            f"{folder} holds {len(others)} weight files and no index: {', '.join(others[:_SHOWN])}. Give the path of "
            "one of them. (LS720)"
        )
    held = f"it holds {', '.join(files[:_SHOWN])}" if files else "it holds no files"
    raise CheckpointError(
        f"{folder} is a folder without weights: {held}. Expected a run directory, a folder of "
        "torch.distributed.checkpoint or the folder of a Hugging Face model. (LS720)"
    )


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a valid index of shards: {error!r}. Download it again. (LS725)"
        ) from error
    if not weight_map:
        raise CheckpointError(f"{path} is an index without shards. Download it again. (LS725)")
    for file in {str(file) for file in weight_map.values()}:
        if Path(file).name != file or file in {"", ".", ".."}:
            raise CheckpointError(f"{path} points to {file!r}, outside its folder, so nothing was read. (LS725)")
        if not (path.parent / file).is_file():
            raise CheckpointError(
                f"{path} names the shard {file}, which does not exist. Download the missing shards. (LS725)"
            )
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_file(path: Path) -> _Content:
    if not path.is_file():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}. Expected a checkpoint: a file, or a folder that holds one. (LS720)")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SIGNATURE_BYTES)
    if not head:
        raise CheckpointError(f"{path} is empty. Copy or download it again. (LS720)")
    if head.startswith(b"PK"):
        value = read_archive(path)
        is_lightning = isinstance(value, Mapping) and _LIGHTNING_KEY in value
        return _Content(value, "a Lightning checkpoint" if is_lightning else "a state_dict")
    if head[8:9] == b"{":
        return _read_safetensors(path, int.from_bytes(head[:8], "little"), size)
    if head[:1] == b"\x80" and not head.startswith(LEGACY_MAGIC):
        raise refuse_pickle(path, "a plain pickle")
    raise CheckpointError(f"{_describe_unknown(path, head)} (LS720)")


def _read_safetensors(path: Path, header_size: int, size: int) -> _Content:
    if header_size + 8 > size:
        raise CheckpointError(
            f"{path} is a truncated safetensors file: its header needs {header_size + 8} bytes, the file has {size}. "
            "Copy or download it again. (LS722)"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if MANIFEST_KEY in metadata:
                return _read_lockstep(path)
            if _SHARDING_KEY in metadata:
                raise CheckpointError(
                    f"{path} holds only one rank's part of sharded tensors. Join the files of all ranks with torch's "
                    "consolidate_safetensors_files first. (LS723)"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a mapping
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged or truncated ({error}). Copy or download it again. (LS722)"
        ) from error
    # safetensors' save_model writes a shared tensor once, and its other names into the metadata.
    aliases = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors and name not in tensors}
    return _Content(value={**tensors, **aliases}, form="a safetensors file")


def _read_lockstep(path: Path) -> _Content:
    checkpoint = load_checkpoint(path)
    extra = decode_state(checkpoint.manifest.model_extra or {}, checkpoint.optimizer)
    if not isinstance(extra, dict):
        raise CheckpointError(f"{path}: its model_extra is not a dictionary. (LS722)")
    form = f"a Lockstep checkpoint after {checkpoint.manifest.global_step} steps"
    return _Content(value={**checkpoint.model, **extra}, form=form)


def _describe_unknown(path: Path, head: bytes) -> str:
    for magic, words in _OTHER_FORMATS:
        if head.startswith(magic):
            return f"{path} is {words}."
    if head[_TAR_NAME_AT:].startswith(b"ustar"):
        return f"{path} is a tar archive: unpack it, and name the file that holds the weights."
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{path} is a web page, not weights: the download asked for a login or failed. Download it again."
    if text.startswith((b"{", b"[")):
        return f"{path} is JSON, not weights. Name the file that holds the tensors, or its folder."
    return (
        f"{path} has no known checkpoint format: it begins with {head[:8]!r}. Expected a file of torch.save, "
        "safetensors or Lockstep, or a folder of them."
    )
