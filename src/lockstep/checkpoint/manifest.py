"""What a checkpoint says beside its tensors. Pure: values to JSON text and back.

State that is neither a number nor a tensor (an optimizer's `param_groups`, a scheduler's milestones) is written as
JSON. JSON has no tuples, no integer keys and no tensors, so these become objects with one tagged key:

    (0.9, 0.999)     {"$tuple": [0.9, 0.999]}
    {0: "a"}         {"$dict": [[0, "a"]]}
    a tensor         {"$tensor": "optimizer/0/exp_avg"}      the name under which it lies in the file
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from lockstep.errors import CheckpointError, LaterFormatError

FORMAT_VERSION = 3
"""Raised when a reader of the version before could misread a file; docs/checkpoint-format.md has each version."""

_DEPTH = 100
"""How deep a manifest may be nested: readers go down by recursion, which ends."""
_COUNTS = ("epoch", "step", "global_step", "num_shards", "seed", "format_version")
_MAPPINGS = ("metrics", "versions", "checksums", "classes")
_MAPPINGS_OR_NONE = ("fingerprint", "config", "model_extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's description."""

    epoch: int
    """The cursor: epoch of the next step."""
    step: int
    """The cursor: number of the next step in its epoch."""
    global_step: int
    """Updates since the run began."""
    num_shards: int
    """Number of shards of the run."""
    seed: int
    """Seed of the run."""
    digest: str
    """Digest of the parameters and buffers."""
    optimizer: Any
    """Optimizer state, tensors replaced by their names."""
    scheduler: Any
    """Scheduler state, likewise; None without one."""
    model_extra: Any = None
    """What the model's state holds beside tensors (`get_extra_state`), encoded likewise; None without."""
    scaler: Any = None
    """Gradient scaler's state, likewise; None without one."""
    loader: str | None = None
    """The loader in words; None before the first step."""
    fingerprint: Mapping[str, Any] | None = None
    """What the digest depends on besides code and data; None in files of earlier versions."""
    config: Mapping[str, Any] | None
    """The resolved config of `lockstep train`; None for a run without one."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Means over the test set at this point; None for one that is not finite, empty where none were measured."""
    classes: Mapping[str, str | None] = field(default_factory=dict)
    """Classes of `optimizer`, of the `scheduler` that the trainer steps, and of the `other_scheduler` that its caller
    does: no state tells of what it is. None where there is none; empty in files of formats 1 and 2."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """CRC-32 of each tensor's bytes, 8 hex digits; whoever writes the file fills it in. Empty in files of format 1."""
    format_version: int = FORMAT_VERSION
    """Version of this description."""

    def to_json(self) -> str:
        """Return the manifest as JSON text.

        Raises:
            CheckpointError: The state in it is nested deeper than a reader would go.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if _is_deep(values):
            raise CheckpointError(f"its state is nested more than {_DEPTH} deep")
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest.

        Raises:
            CheckpointError: Not a manifest.
            LaterFormatError: One of a later format.
        """
        try:
            values = json.loads(text)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise LaterFormatError(
                    f"The checkpoint has format {version}, and this Lockstep reads formats up to {FORMAT_VERSION}. "
                    "Update Lockstep to read it."
                )
            manifest = cls(**values)
            _check_kinds(manifest)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"The checkpoint's manifest cannot be understood: {error!r}.") from error
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A manifest and the tensors it speaks of."""

    model: Mapping[str, Tensor]
    """Parameters and buffers under their names in the model."""
    optimizer: Mapping[str, Tensor]
    """Tensors of the optimizer and scheduler, under the names that the manifest uses."""
    manifest: Manifest
    """Everything else."""


def encode_state(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` with what JSON lacks tagged, and put its tensors into `tensors` under names below `prefix`.

    Raises:
        CheckpointError: Something that is neither a number, text, a container nor a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        while prefix in tensors:  # {"a/b": ..., "a": {"b": ...}}
            prefix += "'"
        tensors[prefix] = value
        return {"$tensor": prefix}
    if isinstance(value, tuple):
        return {"$tuple": [encode_state(item, f"{prefix}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode_state(item, f"{prefix}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = [[key, encode_state(item, f"{prefix}/{key}", tensors)] for key, item in value.items()]
        if isinstance(value, Counter):
            return {"$counter": items}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): item for key, item in items}
        return {"$dict": items}
    raise CheckpointError(
        f"The state at {prefix!r} holds a {type(value).__name__}, which a checkpoint cannot store: expected numbers, "
        "text, containers and tensors."
    )


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `encode_state`.

    Raises:
        CheckpointError: It names a tensor that is not there, or is nothing that `encode_state` returns.
    """
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The state in the checkpoint's manifest cannot be understood: {error!r}.") from error


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
        case {"$counter": items}:
            return Counter({key: _decode(item, tensors) for key, item in items})
        case {"$dict": items}:
            return {key: _decode(item, tensors) for key, item in items}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _check_kinds(manifest: Manifest) -> None:
    """Check that each value is of the kind that its readers count on.

    Raises:
        TypeError: One is not.
        ValueError: It is nested too deep.
    """
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
            raise TypeError(f"{name} is {type(values[name]).__name__}")
    if not all(value is None or isinstance(value, int | float) for value in manifest.metrics.values()):
        raise TypeError("a metric that is no number")
    if not all(value is None or isinstance(value, str) for value in manifest.classes.values()):
        raise TypeError("a class that is no text")
    if _is_deep(values):
        raise ValueError(f"nested more than {_DEPTH} deep")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH):
        inner = [each.values() if isinstance(each, Mapping) else each for each in level]
        level = [item for items in inner for item in items if isinstance(item, Mapping | list | tuple)]
    return bool(level)
