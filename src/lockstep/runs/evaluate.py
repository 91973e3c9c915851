"""Evaluating a saved model on a data set, and a run on all its sets, with all its metrics and averages of weights.

Every sample counts once, with the same bits on any number of workers.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.file import load_checkpoint
from lockstep.data import ShardedLoader
from lockstep.engine.averaging import SWA, AveragedWeights, put_weights
from lockstep.engine.evaluation import has_batchnorm, read_values
from lockstep.engine.saving import unpack_state
from lockstep.engine.schedules import ReduceLROnPlateau
from lockstep.engine.stopping import EarlyStopping
from lockstep.errors import CheckpointError, ConfigError
from lockstep.means import Mean
from lockstep.runs.build import (
    TEST,
    WITHOUT_CALLBACKS,
    RunParts,
    build_parts,
    choose_set,
    first_samples,
    make_loader,
    preferred_name,
)
from lockstep.runs.config import Config
from lockstep.runs.saving import check_metric_name, not_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    data: str
    """The set, by name, or the import path of its function."""
    metrics: Mapping[str, float]
    weights: Mapping[str, float]
    """Over how many samples (or tokens) each is the mean."""
    num_samples: int | None
    """How many samples the data set has; None for a stream, whose length is not known."""
    fingerprint: str
    digest: str


def evaluate_saved(
    config: Config, checkpoint: Path, data: str | None, device: torch.device, weights: str | None = None
) -> Evaluation:
    """Evaluate the weights of a checkpoint (collective: every worker calls).

    `data` names a set of the run, or is the import path of a function that returns one; None for the test set, or else
    the first but the training set. `weights` is "ema" or "swa";
    None for the model's own.
    """
    parts = load_parts(config, checkpoint, data, device, weights)
    data = data or preferred_name(parts.datasets)
    loader: ShardedLoader = choose_set(parts.train, parts.evaluated, data)
    found = measure(parts, loader)
    return Evaluation(
        data=data,
        metrics={name: mean.value for name, mean in found.items()},
        weights={name: float(mean.weight) for name, mean in found.items()},
        num_samples=loader.num_samples,
        digest=parts.trainer.digest(),
        fingerprint=str(parts.trainer.fingerprint()),
    )


def load_parts(
    config: Config, checkpoint: Path, data: str | None, device: torch.device, weights: str | None = None
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
        **({"data": data, "data_args": {}, "overfit": None} if data is not None and ":" in data else {}),
    }
    parts = build_parts(config.model_copy(update=changed), device)
    state = load_weights_of(checkpoint, parts.trainer.model, weights)
    parts.trainer.internals.load_networks(state)
    return parts


def load_weights_of(checkpoint: Path, model: nn.Module, weights: str | None = None) -> dict[str, Any]:
    """Load weights of a checkpoint into a model: its own, or the average "ema" or "swa"; return the whole state.

    Local: every worker calls.
    """
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
    return state


def measure(
    parts: RunParts, loader: ShardedLoader, *, weights: AveragedWeights | None = None, name: str = ""
) -> dict[str, Mean]:
    """Return the mean of each metric over a data set (collective); callbacks get `name` before the names of metrics."""
    found: dict[str, Mean] = dict(parts.trainer.evaluate(loader, parts.metric, weights=weights, name=name))
    if parts.collection is not None:
        for key, value in read_values(
            parts.trainer.evaluate(loader, parts.collection, weights=weights, name=name)
        ).items():
            if not isinstance(value, float):
                raise ConfigError(f"metrics names {key}, which gives {value!r}, expected one number. (LS808)")
            if key in found:
                raise ConfigError(f"metrics names two metrics called {key!r}. Give one of them another name. (LS808)")
            found[key] = Mean(value, 1.0)
    return found


@dataclass(frozen=True, slots=True)
class RunMeans:
    """The means over all data sets that a run evaluates."""

    by_name: Mapping[str, Mean]
    others: Sequence[str]
    """The names of those over another set than the test set."""
    preferred: str = ""
    """What names of the set begin with that is the test set, or else the first of the others."""

    def values(self) -> dict[str, float]:
        return {name: mean.value for name, mean in self.by_name.items()}

    def most_telling(self) -> tuple[str, Mean]:
        """Return the name of the accuracy, or else of the loss, of the set that is preferred, and its mean."""
        for name in (_full_name(self.preferred, "accuracy"), _full_name(self.preferred, "loss")):
            if name in self.by_name:
                return name, self.by_name[name]
        return "", Mean(0.0, 0.0)

    def by_column(self) -> dict[str, float]:
        """Return the values by names that all begin with that of their set, as in metrics.jsonl."""
        return {name if name in self.others else f"{TEST}_{name}": value for name, value in self.values().items()}


def measure_all(parts: RunParts) -> RunMeans:
    """Return the means over all data sets that a run evaluates, also with averaged weights (collective).

    Those of the test set have the names of the metrics, those of others are called `val_loss`; averaged weights come
    first: `ema_loss`, `ema_val_loss`.
    """
    found: dict[str, Mean] = {}
    others: list[str] = []
    with parts.trainer.internals.moments.one_evaluation():
        for set_name, loader in parts.evaluated.items():
            for average, weights in [("", None), *parts.averages.items()]:
                prefix = _prefix(average, set_name)
                measured = measure(parts, loader, weights=weights, name=prefix)
                means = {_full_name(prefix, key): mean for key, mean in measured.items()}
                found |= means
                if set_name != TEST:
                    others += means
    return RunMeans(found, others, _prefix("", preferred_name(parts.evaluated)))


def _prefix(average: str, set_name: str) -> str:
    """Return what comes before the names of metrics: `ema_val`; empty for the model's own weights and the test set."""
    return "_".join(filter(None, [average, "" if set_name == TEST else set_name]))


def _full_name(prefix: str, metric: str) -> str:
    return f"{prefix}_{metric}" if prefix else metric


def update_statistics(parts: RunParts) -> bool:
    """Compute BatchNorm's statistics for means of weights at a run's end (collective); return whether there is one."""
    if not has_batchnorm(parts.trainer.model):
        return False
    means = [each for each in parts.averages.values() if isinstance(each, SWA) and each.num_averaged]
    for mean in means:
        parts.trainer.update_batchnorm(parts.train, mean)
    return bool(means)


def check_metric_names(config: Config, parts: RunParts) -> None:
    """Check that the metrics that a config names will be measured, by measuring a few samples (collective).

    So a metric of the user's that fails does so before the first step, not after the first epoch.
    """
    prefixes = [_prefix(average, set_name) for set_name in parts.evaluated for average in ["", *parts.averages]]
    _check_different(prefixes, parts)
    named = _metrics_of_callbacks(parts)
    has_own = config.metric is not None or bool(config.metrics)
    if config.keep_best is None and not named and not has_own:
        return
    known: list[str] = []
    for set_name in parts.evaluated:
        few = make_loader(config, first_samples(parts.datasets[set_name], config.batch_size), num_workers=0)
        with parts.trainer.internals.moments.no_evaluation(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The metric .* has counted nothing")  # in these few samples
            names = list(measure(parts, few))
        for average in ["", *parts.averages]:
            known += [_full_name(_prefix(average, set_name), name) for name in names]
    _check_different(known, parts)
    check_metric_name(config.keep_best, known)
    for key, name in named.items():
        if name not in known:
            raise not_measured(key, name, known)


def _check_different(names: Sequence[str], parts: RunParts) -> None:
    """Check that no name, or beginning of names, stands for two things."""
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        averages = f" and the averages {', '.join(parts.averages)}" if parts.averages else ""
        raise ConfigError(
            f"{twice!r} would be the name of two results: of the data sets {', '.join(parts.evaluated)}{averages}, "
            "whose names come before those of the metrics. Give the data set, or the metric, another name. (LS808)"
        )


def _metrics_of_callbacks(parts: RunParts) -> dict[str, str]:
    keys = {EarlyStopping: "early_stopping.metric", ReduceLROnPlateau: "scheduler_args.metric"}
    held = parts.trainer.internals.moments.callbacks.all()
    return {keys[type(each)]: each.metric for each in held if isinstance(each, EarlyStopping | ReduceLROnPlateau)}
