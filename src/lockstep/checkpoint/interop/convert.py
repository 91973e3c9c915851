"""Writing weights in the formats of other programs: `.pt`, safetensors, torch.distributed.checkpoint."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint.atomic_write import atomic_replace
from lockstep.checkpoint.interop.names import Renaming, first_components, plain_names
from lockstep.checkpoint.interop.recognize import METADATA_NAME, ForeignWeights, read_weights
from lockstep.checkpoint.interop.weights import as_state_dict, describe_weights
from lockstep.errors import CheckpointError
from lockstep.torch_private.modules import num_stored_elements

Form = Literal["pt", "safetensors", "dcp"]
"""A flat state_dict written by torch.save, a safetensors file, or a directory of torch.distributed.checkpoint (DCP)."""

_SUFFIXES: Mapping[str, Form] = {
    ".pt": "pt",
    ".pth": "pt",
    ".bin": "pt",
    ".safetensors": "safetensors",
    ".dcp": "dcp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    recognised: str
    """The format of the source and the changes to its names, in words."""
    form: Form
    num_tensors: int
    num_bytes: int
    """Number of their bytes; a tensor under two names counts once."""


def convert_weights(
    source: Path, target: Path, form: Form | None = None, *, key: str | None = None, force: bool = False
) -> Conversion:
    """Write the weights at `source` to `target`, atomically (local); None for `form`: by the suffix of `target`."""
    form = _choose_form(target, form)
    _check_target(target, form, force=force)
    weights = read_weights(source, key)
    renaming = plain_names([*weights.tensors, *weights.extra])
    tensors = {renaming.names[name]: tensor for name, tensor in _compact(weights.tensors).items()}
    extra = {renaming.names[name]: value for name, value in weights.extra.items()}
    versions = {renaming.rename_module(module): version for module, version in weights.versions.items()}
    try:
        with atomic_replace(target) as path:
            _WRITERS[form](path, as_state_dict({**tensors, **extra}, versions))
    except KeyError as error:  # safetensors has no name for the dtype
        raise CheckpointError(f"{target} could not be written: a {form} file cannot hold {error}. (LS726)") from error
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. Nothing at this path was changed. (LS726)"
        ) from error
    return Conversion(
        recognised=_describe(weights, renaming, form, key),
        form=form,
        num_tensors=len(tensors),
        num_bytes=sum(map(_num_bytes, {id(tensor): tensor for tensor in tensors.values()}.values())),
    )


def _choose_form(target: Path, form: Form | None) -> Form:
    suffix_form = _SUFFIXES.get(target.suffix)
    if form is not None and form not in get_args(Form):
        raise CheckpointError(f"{form!r} is not a known format. Expected one of: {', '.join(get_args(Form))}. (LS726)")
    if form is not None and suffix_form not in {None, form}:
        raise CheckpointError(
            f"{target} has the suffix of format {suffix_form}, but format {form} was requested. "
            "Choose another name. (LS726)"
        )
    chosen = form or suffix_form
    if chosen is None:
        raise CheckpointError(
            f"The format to write to {target} is not known from its suffix. Expected .pt, .safetensors or .dcp; for "
            "another suffix, give --to pt, --to safetensors or --to dcp. (LS726)"
        )
    return chosen


def _check_target(target: Path, form: Form, *, force: bool) -> None:
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{target} could not be written: there is no folder {target.parent}. Create it first. (LS726)"
        )
    if not os.path.lexists(target):
        return
    if not force:
        raise CheckpointError(f"{target} exists already. Choose another name, or replace it with --force. (LS726)")
    is_sharded = target.is_dir() and ((target / METADATA_NAME).is_file() or not any(target.iterdir()))
    if target.is_dir() and not is_sharded:
        raise CheckpointError(f"{target} is a folder of other files and is not replaced. Choose another name. (LS726)")
    if target.is_dir() != (form == "dcp"):
        found = "folder" if target.is_dir() else "file"
        expected = "folder" if form == "dcp" else "file"
        raise CheckpointError(
            f"{target} is a {found}, but format {form} is a {expected}. "
            "Remove it first, or choose another name. (LS726)"
        )


def _compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor with a storage of just its size; names of one shared tensor still share one."""
    packed: dict[tuple[Any, ...], Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach()
        if plain.layout is torch.strided and not plain.is_quantized:
            plain = plain.resolve_conj().resolve_neg()  # safetensors writes raw memory and ignores these bits
            memory = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
            if memory not in packed:
                fills_storage = plain.untyped_storage().nbytes() == plain.nbytes and plain.is_contiguous()
                packed[memory] = plain if fills_storage else plain.clone(memory_format=torch.contiguous_format)
            plain = packed[memory]
        result[name] = plain
    return result


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return num_stored_elements(tensor) * tensor.element_size()


def _write_pt(path: Path, state: "OrderedDict[str, Any]") -> None:
    torch.save(state, path)


def _write_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    """Write shared tensors once per name, so that any reader finds all names."""
    path.touch()
    mode = path.stat().st_mode  # save_file makes its files readable for the owner only
    seen: set[int] = set()
    separate = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(separate, path, metadata={"format": "pt"})
    path.chmod(mode)


def _write_dcp(path: Path, state: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint import CheckpointException, save  # deferred: it imports many modules

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: only this process writes
        try:
            save(dict(state), checkpoint_id=path, no_dist=True)
        except CheckpointException as error:  # a BaseException that wraps the error of this process
            raise error.failures[0][0] from error


_WRITERS = {"pt": _write_pt, "safetensors": _write_safetensors, "dcp": _write_dcp}


def _describe(weights: ForeignWeights, renaming: Renaming, form: Form, key: str | None) -> str:
    notes = [describe_weights(weights, renaming)]
    if form == "safetensors" and weights.extra:
        notes.append(f"left out, because safetensors can hold only tensors: {', '.join(weights.extra)}")
    heads = first_components(renaming.names.values())
    if key is None and len(heads) == 1 and list(heads.values()) == [len(renaming.names)]:
        head = next(iter(heads))
        notes.append(f"every name begins with '{head}.'; --key {head} drops this prefix")
    return "; ".join(notes)
