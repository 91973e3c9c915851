"""The manifest: everything in a checkpoint but the tensors, as JSON text. Pure.

The states of the optimizer, the scheduler and the scaler are written as JSON. JSON has no tuples, no integer keys, no
`collections.Counter` and no tensors, so these become objects with one tagged key:

    (0.9, 0.999)         {"$tuple": [0.9, 0.999]}
    {0: "a"}             {"$dict": [[0, "a"]]}                   a list as a key is a tuple
    Counter({10: 1})     {"$counter": [[10, 1]]}
    {1, 2}               {"$set": [1, 2]}
    an array of NumPy    {"$numpy": {"$tensor": "optimizer/extra/seen"}}
    a tensor             {"$tensor": "optimizer/0/exp_avg"}      its name in the file
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, LaterFormatError

OLDEST_VERSION = 3
FORMAT_VERSION = 5
"""Incremented when a reader of the previous version could misread a file; docs/checkpoint-format.md describes each."""
NETWORKS_PREFIX = "optimizer/networks"
"""Before the names of the tensors of networks that the loss uses beside the model, which belong to the digest."""

_MAX_DEPTH = 100
"""How deep a manifest may be nested: readers are recursive, and Python limits recursion."""
_COUNTS = ("epoch", "step", "global_step", "num_shards", "seed", "format_version")
_MAPPINGS = ("metrics", "versions", "checksums", "classes")
_MAPPINGS_OR_NONE = ("fingerprint", "config", "model_extra", "callbacks", "extra", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    epoch: int
    """The cursor: epoch of the next step."""
    step: int
    """The cursor: index of the next step in its epoch."""
    global_step: int
    """Number of optimizer updates since the run began."""
    num_shards: int
    seed: int
    digest: str
    """Digest of the parameters and buffers."""
    optimizer: Any
    """State of the optimizer, encoded by `encode_state`."""
    scheduler: Any
    """State of the scheduler, encoded likewise; None without a scheduler."""
    model_extra: Any = None
    """Extra state of the model's modules (`get_extra_state`), encoded likewise; None without any."""
    scaler: Any = None
    """State of the gradient scaler, encoded likewise; None without a scaler."""
    callbacks: Any = None
    """States of the trainer's callbacks by name, encoded likewise; None without any."""
    extra: Any = None
    """States of other objects that the user has saved with the run, by name, encoded likewise; None without any."""
    parts: Any = None
    """Further parts of the run's state by name, encoded likewise: `networks` that the loss uses beside the model, and
    `optimizer_parameters`, the names of the optimizer's parameters by group. None in files of earlier formats."""
    loader: str | None = None
    """Description of the loader in words; None before the first step."""
    fingerprint: Mapping[str, Any] | None = None
    """What the digest depends on besides code and data; None in files of earlier versions."""
    config: Mapping[str, Any] | None
    """The resolved config of `lockstep train`; None for a run without a config."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Means over the test set at this step; None for a mean that is not finite. Empty if nothing was measured."""
    classes: Mapping[str, str | None] = field(default_factory=dict)
    """Class names of the `optimizer`, of the `scheduler` that the trainer steps, and of the `other_scheduler` that the
    caller steps. Needed because a `state_dict` does not name its class. None if there is no such object."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote the file."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """CRC-32 of each tensor's bytes, 8 hex digits; `save_checkpoint` fills it in."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if _is_deep(values):
            raise CheckpointError(f"its state is nested more than {_MAX_DEPTH} levels deep")
        return json.dumps(values)  # not sorted: the order of a dictionary may be a part of its state

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        try:
            values = json.loads(text)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise LaterFormatError(
                    f"The checkpoint has format {version}, but this version of Lockstep reads only formats up to "
                    f"{FORMAT_VERSION}. Update Lockstep to read it. (LS705)"
                )
            if version < OLDEST_VERSION:
                raise CheckpointError(
                    f"The checkpoint has format {version}, but this version of Lockstep reads only formats "
                    f"{OLDEST_VERSION} to {FORMAT_VERSION}. Convert its weights with the Lockstep that wrote it: "
                    "lockstep checkpoint convert. (LS702)"
                )
            manifest = cls(**values)
            _check_kinds(manifest)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"The checkpoint's manifest cannot be parsed: {error!r}. (LS702)") from error
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    model: Mapping[str, Tensor]
    """Parameters and buffers by the names of the model's `state_dict`."""
    optimizer: Mapping[str, Tensor]
    """Tensors of the optimizer, the scheduler, the scaler and of extra state, by the names that the manifest uses."""
    manifest: Manifest


def encode_state(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON with tagged objects; add its tensors to `tensors` under names that begin with `prefix`.

    A tensor that is there twice has one name, so that it is one tensor again when it is read.
    """
    return _encode(value, prefix, tensors, {})


def _encode(value: Any, prefix: str, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if id(value) not in names:
            while prefix in tensors:  # for example {"a/b": ..., "a": {"b": ...}}
                prefix += "'"
            tensors[prefix], names[id(value)] = value, prefix
        return {"$tensor": names[id(value)]}
    if isinstance(value, Mapping):
        _check_keys(value, prefix)
        pairs = [[key, _encode(item, f"{prefix}/{key}", tensors, names)] for key, item in value.items()]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): item for key, item in pairs}
        return {"$dict": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_encode(item, f"{prefix}/{i}", tensors, names) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": items}
    if type(value).__module__ == "numpy" and (array := _from_numpy(value)) is not None:
        return {"$numpy": _encode(array, prefix, tensors, names)}
    raise CheckpointError(
        f"The state at {prefix!r} contains a {type(value).__name__}, which a checkpoint cannot store. Expected "
        "numbers, text, tensors, and lists, tuples and dictionaries of these. (LS704)"
    )


def _from_numpy(value: Any) -> Tensor | None:
    """Return an array or a number of NumPy as a tensor; None for one of a kind that tensors have not."""
    try:
        return torch.as_tensor(value.copy())
    except (TypeError, RuntimeError):  # of texts, or of objects
        return None


def _check_keys(keys: Iterable[Any], prefix: str) -> None:
    for key in keys:
        if isinstance(key, tuple):
            _check_keys(key, prefix)
        elif not (key is None or isinstance(key, bool | int | float | str)):
            raise CheckpointError(
                f"The state at {prefix!r} has a {type(key).__name__} as a key of a dictionary, which a checkpoint "
                "cannot store. Expected text, numbers, and tuples of these. (LS704)"
            )


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state in the checkpoint's manifest cannot be decoded: {error!r}. (LS702)"
        ) from error


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$set": items}:
            return {_decode(item, tensors) for item in items}
        case {"$numpy": item}:
            return _decode(item, tensors).numpy()[()]  # a number of NumPy, where there are no dimensions
        case {"$counter": items}:
            return Counter({_decode_key(key): _decode(item, tensors) for key, item in items})
        case {"$dict": items}:
            return {_decode_key(key): _decode(item, tensors) for key, item in items}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _decode_key(key: Any) -> Any:
    return tuple(map(_decode_key, key)) if isinstance(key, list) else key


def _check_kinds(manifest: Manifest) -> None:
    """Check the type of each value; raise TypeError or ValueError, which `from_json` handles."""
    kinds: dict[str, Any] = {
        **dict.fromkeys(_COUNTS, int),
        **dict.fromkeys(_MAPPINGS, dict),
        **dict.fromkeys(_MAPPINGS_OR_NONE, dict | None),
        "digest": str,
        "loader": str | None,
    }
    values = {each.name: getattr(manifest, each.name) for each in fields(manifest)}
    for name, kind in kinds.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
    if not all(value is None or isinstance(value, int | float) for value in manifest.metrics.values()):
        raise TypeError("a metric that is not a number")
    if not all(value is None or isinstance(value, str) for value in manifest.classes.values()):
        raise TypeError("a class name that is not text")
    if _is_deep(values):
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [each.values() if isinstance(each, Mapping) else each for each in level]
        level = [item for items in inner for item in items if isinstance(item, Mapping | list | tuple)]
    return bool(level)
