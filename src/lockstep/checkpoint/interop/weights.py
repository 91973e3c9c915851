"""Loading weights from a file of any known format into a model."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.checkpoint.file import raw_bytes
from lockstep.checkpoint.interop.locate import EXTRA_STATE
from lockstep.checkpoint.interop.names import (
    LoadedWeights,
    Renaming,
    Shape,
    describe_misfit,
    find_shape_mismatches,
    first_components,
    fit_names,
)
from lockstep.checkpoint.interop.pickled import UNREADABLE
from lockstep.checkpoint.interop.recognize import ForeignWeights, read_weights
from lockstep.errors import CheckpointError
from lockstep.torch_private.modules import TorchDispatchMode, set_state_dict_versions


def load_weights(path: str | Path, model: nn.Module, *, strict: bool = True, key: str | None = None) -> LoadedWeights:
    """Copy the parameters and buffers at `path` into `model`, on any device (local).

        torch.save(model.state_dict(), "weights.pt")
        ls.load_weights("weights.pt", Net())

    Reads checkpoints and run directories of Lockstep, files of `torch.save`, Lightning and safetensors, and folders of
    Hugging Face and of torch.distributed.checkpoint. Prefixes that DataParallel, DistributedDataParallel, torch.compile
    or a LightningModule added to names are removed. No code from the file is executed. No GPU memory is allocated:
    tensors are read to the CPU and copied into the model's tensors, which converts them to the model's dtypes.

    Args:
        path: The file or folder.
        model: The model whose tensors are written. If an error is raised, none is written.
        strict: Raise an error if names or shapes differ. If False, load what fits and return what does not; if nothing
            fits, an error is raised too.
        key: Which of several sets of weights in the file to use (`ema`), or the first components of their names
            (`model`).

    Raises:
        CheckpointError: The file cannot be read or could run code, or names or shapes differ from the model's. One
            message lists all differences.
        TypeError: The model is given first.
        ValueError: The model is on the meta device.
    """
    if isinstance(path, nn.Module):
        raise TypeError("load_weights was given the model first. Write ls.load_weights(path, model). (LS727)")
    targets = model.state_dict(keep_vars=True)
    if any(isinstance(target, Tensor) and target.is_meta for target in targets.values()):
        raise ValueError(
            "The model is on the meta device, which has no memory. Call model.to_empty(device=...) first. (LS724)"
        )
    weights = read_weights(Path(path), key)
    content = {**weights.tensors, **weights.extra}
    renaming = fit_names(content, targets)
    state = {renaming.names[name]: value for name, value in content.items()}
    versions = {renaming.rename_module(module): version for module, version in weights.versions.items()}
    loaded = _compare(model, targets, state, versions, describe_weights(weights, renaming))
    nothing_fits = len(loaded.unexpected) + len(loaded.misshaped) == len(state)
    if nothing_fits or (strict and not loaded.fits):
        message = describe_misfit(loaded, str(path), _hint(state, targets), can_load_rest=strict and not nothing_fits)
        raise CheckpointError(f"{message} (LS727)")
    fitting = as_state_dict(state, versions, loaded.misshaped)
    try:
        model.load_state_dict(fitting, strict=False)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} could not be copied into the model: {error}. (LS727)") from error
    return loaded


def describe_weights(weights: ForeignWeights, renaming: Renaming) -> str:
    form = weights.form
    if renaming.is_wrapped:
        form = form.replace("a state_dict", "a DataParallel or DistributedDataParallel state_dict", 1)
    return "; ".join([form, *renaming.notes, *weights.notes])


class _SkipCopies(TorchDispatchMode):
    """Skip `Tensor.copy_`: in this mode `load_state_dict` reports missing and unexpected names and changes nothing."""

    def __torch_dispatch__(
        self, func: Any, _types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _compare(
    model: nn.Module,
    targets: Mapping[str, Any],
    state: Mapping[str, Any],
    versions: Mapping[str, Any],
    recognised: str,
) -> LoadedWeights:
    """Find what does not fit with `load_state_dict`, because modules rename entries of their earlier versions in it."""
    found = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    misshaped = find_shape_mismatches(found, {name: _shape(value) for name, value in targets.items()})
    # Setting extra state may have side effects, so extra state is only compared by name.
    plain = {name: value for name, value in state.items() if name.rpartition(".")[2] != EXTRA_STATE}
    with _SkipCopies():  # type: ignore[no-untyped-call]
        missing, unexpected = model.load_state_dict(as_state_dict(plain, versions, misshaped), strict=False)
    extra = {name for name in targets if name.rpartition(".")[2] == EXTRA_STATE}
    missing = [name for name in missing if name not in extra and name not in misshaped]
    held = set(state) - set(unexpected)
    groups = _shared_names(targets)
    given = {name for group in groups if held.intersection(group) for name in group}
    return LoadedWeights(
        recognised=recognised,
        missing=(*(name for name in missing if name not in given), *sorted(extra - set(state))),
        unexpected=(*unexpected, *(name for name in state if name not in plain and name not in extra)),
        misshaped=misshaped,
        clashing=tuple(
            (first, second)
            for group in groups
            for first, second in itertools.pairwise(name for name in group if name in found)
            if _bits_differ(state[first], state[second])
        ),
    )


def _bits_differ(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return True
    if torch.equal(first, second):
        return False
    return first.layout is not torch.strided or raw_bytes(first) != raw_bytes(second)  # torch.equal is False for a NaN


def _shared_names(targets: Mapping[str, Any]) -> list[list[str]]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in targets.items():
        if isinstance(value, Tensor) and not is_lazy(value) and value.layout is torch.strided and value.numel():
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def as_state_dict(
    state: Mapping[str, Any], versions: Mapping[str, Any], without: Iterable[str] = ()
) -> "OrderedDict[str, Any]":
    left_out = set(without)
    chosen = OrderedDict((name, value) for name, value in state.items() if name not in left_out)
    set_state_dict_versions(chosen, versions)
    return chosen


def _shape(value: Any) -> Shape | None:
    return tuple(value.shape) if isinstance(value, Tensor) and not is_lazy(value) else None


def _hint(state: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    """Return a hint if more than half of the model's names are in the file under one first component."""
    for head in first_components(state):
        under = {name.removeprefix(f"{head}.") for name in state if name.startswith(f"{head}.")}
        matching = len(under & targets.keys())
        if 2 * matching > len(targets):
            return f"The file has {matching} of the model's {len(targets)} names under {head!r}: pass key={head!r}."
    return ""
