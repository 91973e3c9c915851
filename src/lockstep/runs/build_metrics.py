"""Constructing the metrics that a config names."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine import Metric
from lockstep.engine.evaluation import MetricValues
from lockstep.engine.metrics import accuracy, has_classes
from lockstep.errors import ConfigError
from lockstep.runs.build_callbacks import build_named
from lockstep.runs.config import Config
from lockstep.runs.importing import import_object
from lockstep.torch_private.modules import tree_leaves

Criterion = Callable[[Any, Any], Tensor]
"""A loss as a config names it: called with (output, target)."""
Counter = Callable[[Any, Any], tuple[float, float]]
"""A metric as a config names it: called with (output, target), returns a sum and a count."""


@dataclass(frozen=True, slots=True)
class Metrics:
    function: Metric
    """Loss, accuracy where it applies, and the functions that the config names."""
    collection: Any
    """The objects of torchmetrics that the config names, as one; None without any."""


def build_metrics(config: Config, criterion: Criterion, device: torch.device) -> Metrics:
    counters: dict[str, Counter] = {}
    objects: list[Any] = []
    if config.metric is not None:
        counters.update(_named_counter("metric", import_object("metric", config.metric)))
    for named in config.metrics:
        made = build_named("metrics", named)
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(made, torchmetrics.Metric | torchmetrics.MetricCollection):
            objects.append(made)
            continue
        for name, counter in _named_counter("metrics", made).items():
            if name in counters or name == "loss":
                raise ConfigError(f"metrics names two metrics called {name!r}. Give the functions other names. (LS808)")
            counters[name] = counter
    function = _as_metric(criterion, counters, has_accuracy=config.metric is None and "accuracy" not in counters)
    return Metrics(function, _collect(objects, device) if objects else None)


def _collect(objects: Sequence[Any], device: torch.device) -> Any:
    collection = sys.modules["torchmetrics"].MetricCollection
    try:
        return collection(list(objects)).to(device)
    except ValueError as error:
        raise ConfigError(f"metrics cannot be used together: {error} (LS808)") from error


def _named_counter(key: str, metric: Any) -> dict[str, Counter]:
    if not callable(metric):
        raise ConfigError(
            f"{key} names a {type(metric).__name__}, expected a function of (output, target) that returns a sum and a "
            "count, or a class of torchmetrics. (LS808)"
        )
    default = "metric" if key == "metric" else type(metric).__name__
    counter: Counter = metric
    return {getattr(metric, "__name__", default): counter}


def _as_metric(criterion: Criterion, counters: dict[str, Counter], *, has_accuracy: bool) -> Metric:
    def evaluate(model: nn.Module, batch: Any) -> MetricValues:
        inputs, target = input_and_target(batch)
        output = model(inputs)
        loss = criterion(output, target)
        num_samples = _count_samples(target)
        values: dict[str, tuple[float | Tensor, float]] = {"loss": (loss.double() * num_samples, num_samples)}
        with torch.autocast(next(model.parameters()).device.type, enabled=False):  # the trainer's is around it
            for name, counter in counters.items():
                values[name] = counter(output, target)
        if has_accuracy and has_classes(output, target):
            values["accuracy"] = accuracy(output, target)
        return values

    return evaluate


def _count_samples(target: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not sizes:
        raise ConfigError(
            "data yields targets without a tensor in them, expected one with the samples along dimension 0. (LS808)"
        )
    return sizes[0]


def input_and_target(batch: Any) -> tuple[Any, Any]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):  # noqa: PLR2004
        raise ConfigError(
            f"data yields samples that collate to a {type(batch).__name__}, expected pairs (input, target). "
            "For other batches write a training loop with ls.Trainer, whose loss gets the whole batch. (LS808)"
        )
    return batch[0], batch[1]
