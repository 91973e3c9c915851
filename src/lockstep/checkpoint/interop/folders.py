"""Finding the weight files in a folder, such as the shards of a Hugging Face model."""

import json
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
"""Suffix of the file that maps each tensor to its shard file."""

METADATA_NAME = ".metadata"
"""The file that every folder of torch.distributed.checkpoint contains."""

_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
_USUAL_FILES = tuple(f"{stem}{suffix}" for suffix in (".safetensors", ".bin") for stem in _STEMS)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_SHOWN = 6


def find_weight_files(folder: Path) -> tuple[str, Mapping[str, str] | None]:
    """Return the name of a folder's weight file and None, or the name of its index and the index's weight map.

    An index is preferred to a single file, and safetensors to pickles, as in the Hugging Face libraries.
    """
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in _USUAL_FILES:
        if f"{name}{INDEX_SUFFIX}" in files:
            return f"{name}{INDEX_SUFFIX}", _read_index(folder / f"{name}{INDEX_SUFFIX}")
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
