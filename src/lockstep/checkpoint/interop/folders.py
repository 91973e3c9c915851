"""Which files of a folder hold its weights: a run's newest checkpoint, or the shards of a Hugging Face model."""

import json
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
"""What the file is called that says in which shard each tensor lies."""

METADATA_NAME = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""

_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
_USUAL_FILES = tuple(f"{stem}{suffix}" for suffix in (".safetensors", ".bin") for stem in _STEMS)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_SHOWN = 6


def find_weight_files(folder: Path) -> tuple[str, Mapping[str, str] | None]:
    """Return the name of the file that holds a folder's weights, or of its index and what the index says.

    An index counts before a single file, and safetensors before pickles, as in the libraries that write them.

    Raises:
        CheckpointError: There is none, or there are several.
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
            f"{folder} holds {len(others)} files of weights and no index: {', '.join(others[:_SHOWN])}. Name one "
            "of them."
        )
    held = f"it holds {', '.join(files[:_SHOWN])}" if files else "it holds no files"
    raise CheckpointError(
        f"{folder} is a folder without weights: {held}. Expected a run directory, a folder of "
        "torch.distributed.checkpoint or one of Hugging Face's."
    )


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of shards: {error!r}. Download it again.") from error
    if not weight_map:
        raise CheckpointError(f"{path} is an index without shards. Download it again.")
    for file in {str(file) for file in weight_map.values()}:
        if Path(file).name != file or file in {"", ".", ".."}:
            raise CheckpointError(f"{path} points to {file!r}, outside its folder, so nothing was read.")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} names the shard {file}, which is not there. Download the missing shards.")
    return {str(name): str(file) for name, file in weight_map.items()}
