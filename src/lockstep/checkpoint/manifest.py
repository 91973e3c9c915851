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
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lockstep.errors import CheckpointError

FORMAT_VERSION = 2
"""Raised when a reader of the version before could misread a file; docs/checkpoint-format.md has each version."""


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
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """CRC-32 of each tensor's bytes, 8 hex digits; whoever writes the file fills it in. Empty in files of format 1."""
    format_version: int = FORMAT_VERSION
    """Version of this description."""

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest.

        Raises:
            CheckpointError: Not a manifest, or one of a later format.
        """
        try:
            values = json.loads(text)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"The checkpoint has format {version}, and this Lockstep reads formats up to {FORMAT_VERSION}. "
                    "Update Lockstep to read it."
                )
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"The checkpoint's manifest cannot be understood: {error!r}.") from error


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
    """Undo `encode_state`."""
    if isinstance(value, list):
        return [decode_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(decode_state(item, tensors) for item in items)
        case {"$counter": items}:
            return Counter({key: decode_state(item, tensors) for key, item in items})
        case {"$dict": items}:
            return {key: decode_state(item, tensors) for key, item in items}
    return {key: decode_state(item, tensors) for key, item in value.items()}
