"""Evaluating a saved model on a data set: every sample once, with the same bits on any number of workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint import load_checkpoint
from lockstep.data import ShardedLoader
from lockstep.engine.averaging import put_weights
from lockstep.engine.state_file import unpack_state
from lockstep.errors import CheckpointError
from lockstep.runs.build import RunParts, build_parts
from lockstep.runs.build_callbacks import WITHOUT_CALLBACKS
from lockstep.runs.build_data import build_collate
from lockstep.runs.config import Config
from lockstep.runs.data_sets import TRAIN, unknown_set
from lockstep.runs.measuring import measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation has measured; the same on every worker."""

    values: Mapping[str, float]
    """Mean of each metric."""
    weights: Mapping[str, float]
    """Over how many samples (or tokens) each is the mean."""
    num_samples: int | None
    """How many samples the data set has; None for a stream, whose length is not known."""
    digest: str
    """Digest of the weights that were evaluated."""
    fingerprint: str
    """What the bits depend on besides code and data."""


def evaluate_saved(
    config: Config, checkpoint: Path, data: str, device: torch.device, weights: str | None = None
) -> Evaluation:
    """Evaluate the weights of a checkpoint (collective: every worker calls).

    `data` names a set of the run, or is the import path of a function that returns one. `weights` is "ema" or "swa";
    None for the model's own.
    """
    parts = load_parts(config, checkpoint, data, device, weights)
    loader = _find_loader(parts, config, data)
    found = measure(parts, loader)
    return Evaluation(
        values={name: mean.value for name, mean in found.items()},
        weights={name: mean.weight for name, mean in found.items()},
        num_samples=loader.num_samples,
        digest=parts.trainer.digest(),
        fingerprint=str(parts.trainer.fingerprint()),
    )


def load_parts(
    config: Config, checkpoint: Path, data: str, device: torch.device, weights: str | None = None
) -> RunParts:
    """Build what a config names, with other data if `data` is an import path, and load the weights (collective)."""
    changed = {
        "on_worker_loss": "stop",
        "drop_last": False,  # data that are not trained on may be smaller than a batch
        "weights": None,
        "lengths": None,
        "scheduler": None,  # nor have they as many steps, on which a schedule depends
        "scheduler_args": {},
        "warmup": 0.0,
        **WITHOUT_CALLBACKS,
        **({"data": data, "data_args": {}} if ":" in data else {}),
    }
    parts = build_parts(config.model_copy(update=changed), device)
    load_weights_of(checkpoint, parts.trainer.model, weights)
    return parts


def load_weights_of(checkpoint: Path, model: nn.Module, weights: str | None = None) -> None:
    """Load weights of a checkpoint into a model: its own, or the average "ema" or "swa" (local: every worker calls)."""
    state = unpack_state(load_checkpoint(checkpoint))
    averages = {
        name.lower(): found["tensors"]
        for name, found in (state.get("callbacks") or {}).items()
        if isinstance(found, Mapping) and found.get("tensors") and found.get("num_averaged") != 0
    }
    if weights is not None and weights.lower() not in averages:
        there = f"only its own and {', '.join(averages)}" if averages else "only its own"
        raise CheckpointError(
            f"{checkpoint} has no weights named {weights!r}, {there}. `ema: {{decay: 0.999}}` in a config keeps an "
            "average, and swa does from the end of its start_epoch on. (LS715)"
        )
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint} does not fit the model {type(model).__name__}: {' '.join(str(error).split())} Use the code "
            "with which the run was trained. (LS727)"
        ) from error
    if weights is not None:
        put_weights(model, averages[weights.lower()])


def _find_loader(parts: RunParts, config: Config, data: str) -> ShardedLoader:
    if data == TRAIN:
        return parts.train
    if ":" in data:
        return parts.train if parts.test is None else parts.test
    if data in parts.evaluated:
        return parts.evaluated[data]
    if data in parts.datasets:
        return ShardedLoader(
            parts.datasets[data],
            batch_size=config.batch_size,
            num_shards=config.num_shards,
            seed=config.seed,
            shuffle=False,
            collate_fn=build_collate(config),
            num_workers=config.loader_workers,
        )
    raise unknown_set(data, [TRAIN, *parts.datasets])
