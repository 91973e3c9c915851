"""Evaluating a run on all its data sets, with all its metrics and weights; and which names that gives."""

import difflib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

from lockstep.data import ShardedLoader
from lockstep.engine.averaging import SWA, AveragedWeights
from lockstep.engine.batchnorm_update import has_batchnorm
from lockstep.engine.metrics import Mean
from lockstep.engine.moments import read_values
from lockstep.engine.plateau import ReduceLROnPlateau
from lockstep.errors import ConfigError
from lockstep.runs.build import RunParts, first_samples
from lockstep.runs.build_data import build_collate
from lockstep.runs.config import Config
from lockstep.runs.data_sets import TEST
from lockstep.runs.retention import check_metric_name


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
            found[key] = Mean(total=value, weight=1.0)
    return found


def update_statistics(parts: RunParts) -> bool:
    """Compute the statistics of BatchNorm anew for means of the weights (collective); return whether there is one.

    At the end of a run.
    """
    if not has_batchnorm(parts.trainer.model):
        return False
    means = [each for each in parts.averages.values() if isinstance(each, SWA) and each.num_averaged]
    for mean in means:
        parts.trainer.update_batchnorm(parts.train, mean)
    return bool(means)


def measure_all(parts: RunParts) -> dict[str, Mean]:
    """Return the means over all data sets that a run evaluates, also with averaged weights (collective).

    Those of the test set have the names of the metrics, those of others are called `val_loss`; averaged weights come
    first: `ema_loss`, `ema_val_loss`.
    """
    found: dict[str, Mean] = {}
    with parts.trainer.moments.one_evaluation():
        for set_name, loader in parts.evaluated.items():
            for average, weights in [("", None), *parts.averages.items()]:
                prefix = _prefix(average, set_name)
                means = measure(parts, loader, weights=weights, name=prefix)
                found.update({_full_name(prefix, key): mean for key, mean in means.items()})
    return found


def _prefix(average: str, set_name: str) -> str:
    """Return what comes before the names of metrics: `ema_val`; empty for the model's own weights and the test set."""
    return "_".join(filter(None, [average, "" if set_name == TEST else set_name]))


def _full_name(prefix: str, metric: str) -> str:
    return f"{prefix}_{metric}" if prefix else metric


def values_of(means: Mapping[str, Mean]) -> dict[str, float]:
    return {name: mean.value for name, mean in means.items()}


def check_metric_names(config: Config, parts: RunParts) -> None:
    """Check that the metrics that a config names will be measured, by measuring a few samples (collective).

    So a metric of the user's that fails does so before the first step, not after the first epoch.
    """
    prefixes = [_prefix(average, set_name) for set_name in parts.evaluated for average in ["", *parts.averages]]
    _check_different(prefixes, parts)
    named = _metrics_of_callbacks(config, parts)
    has_own = config.metric is not None or bool(config.metrics)
    if config.keep_best is None and not named and not has_own:
        return
    known: list[str] = []
    for set_name in parts.evaluated:
        few = ShardedLoader(
            first_samples(parts.datasets[set_name], config.batch_size),
            batch_size=config.batch_size,
            num_shards=config.total_shards,
            seed=config.seed,
            shuffle=False,
            collate_fn=build_collate(config),
        )
        with parts.trainer.moments.no_evaluation(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The metric .* has counted nothing")  # in these few samples
            names = list(measure(parts, few))
        for average in ["", *parts.averages]:
            known += [_full_name(_prefix(average, set_name), name) for name in names]
    _check_different(known, parts)
    check_metric_name(config.keep_best, dict.fromkeys(known, 0.0))
    for key, name in named.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{key} is {name!r}, but no such metric is measured. "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + (f"Expected {' or '.join(known)}." if known else "It needs a test set: data returned None.")
                + " (LS808)"
            )


def _check_different(names: Sequence[str], parts: RunParts) -> None:
    """Check that no name, or beginning of names, stands for two things."""
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        averages = f" and the averages {', '.join(parts.averages)}" if parts.averages else ""
        raise ConfigError(
            f"{twice!r} would be the name of two results: of the data sets {', '.join(parts.evaluated)}{averages}, "
            "whose names come before those of the metrics. Give the data set, or the metric, another name. (LS808)"
        )


def _metrics_of_callbacks(config: Config, parts: RunParts) -> dict[str, str]:
    """Return the metrics that callbacks wait for, by config key."""
    named = {} if config.early_stopping is None else {"early_stopping.metric": config.early_stopping.metric}
    for each in parts.trainer.moments.callbacks.all():
        if isinstance(each, ReduceLROnPlateau):
            named["scheduler_args.metric"] = each.metric
    return named


def split_by_set(parts: RunParts, values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the values of the test set, and those of others."""
    others = tuple(
        f"{prefix}{name}_"
        for name in parts.evaluated
        if name != TEST
        for prefix in ["", *map("{}_".format, parts.averages)]
    )
    is_other = {name: name.startswith(others) for name in values}
    return (
        {name: value for name, value in values.items() if not is_other[name]},
        {name: value for name, value in values.items() if is_other[name]},
    )
