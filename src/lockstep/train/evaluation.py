"""Means over a data set, every sample counted once, with the same bits on any number of workers."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only  # the walk that torch itself uses over nested values

from lockstep.comm import World
from lockstep.data import ShardedBatch, Slice
from lockstep.train.metrics import Mean, add_means

MetricValues = tuple[float | Tensor, float | Tensor] | Mapping[str, tuple[float | Tensor, float | Tensor]]
"""A sum and its weight, or several by name."""


def sum_by_shard(
    slices: Iterator[tuple[ShardedBatch, Slice]], values_of: Callable[[ShardedBatch, Slice], MetricValues], world: World
) -> dict[str, Mean]:
    """Add up what a metric gives for every slice (collective).

    Sums are kept per shard and added in shard order.

    Args:
        slices: Those of this worker.
        values_of: The metric.
        world: The workers.
    """
    sums: dict[int, dict[str, Mean]] = {}
    for batch, part in slices:
        _add_values(sums.setdefault(part.shard, {}), values_of(batch, part))
    by_shard: dict[int, dict[str, Mean]] = {}
    for gathered in world.gather_objects(sums):
        by_shard.update(gathered)
    ordered = [by_shard[shard] for shard in sorted(by_shard)]
    names = list(dict.fromkeys(name for shard in ordered for name in shard))
    return {name: add_means(shard[name] for shard in ordered if name in shard) for name in names}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each part of it back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Each its own: a model that is fine-tuned may have parts in evaluation mode.
        for module, training in modes.items():
            module.training = training


def _add_values(sums: dict[str, Mean], values: MetricValues) -> None:
    named = values if isinstance(values, Mapping) else {"metric": values}
    for name, (total, weight) in named.items():
        new = Mean(total=float(total), weight=float(weight))
        sums[name] = add_means([sums[name], new]) if name in sums else new


def is_torchmetrics(metric: object) -> bool:
    """Whether `metric` is an object of torchmetrics, which is asked only if somebody has imported it."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, module.Metric | module.MetricCollection)


def update_in_order(
    metric: Any,
    batches: Iterator[ShardedBatch],
    update_of: Callable[[ShardedBatch, Slice], tuple[Any, Any]],
    world: World,
) -> Any:
    """Let an object of torchmetrics see all predictions, in the order of the data, and return what it computes.

    It is updated on rank 0 alone, which gets the others' predictions; its own synchronisation would add up in an order
    that depends on the number of workers. (Collective.)

    Args:
        metric: A Metric or MetricCollection; it is reset before and left as it is afterwards.
        batches: This worker's part of each.
        update_of: Returns predictions and target of a slice.
        world: The workers.
    """
    metric.reset()
    device = next(part.device for part in _singles(metric))
    for batch in batches:
        mine = [(part.shard, update_of(batch, part)) for part in batch.slices]
        if world.rank == 0 and world.group is None:
            found = [mine]
        else:
            found = world.gather_objects(tree_map_only(Tensor, Tensor.cpu, mine))
        if world.rank == 0:
            for _, (prediction, target) in sorted(itertools.chain(*found), key=itemgetter(0)):
                metric.update(*tree_map_only(Tensor, lambda tensor: tensor.to(device), (prediction, target)))
    if world.rank == 0:
        with _alone(metric):
            value = metric.compute()
    return world.gather_objects(tree_map_only(Tensor, Tensor.cpu, value) if world.rank == 0 else None)[0]


@contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """Let a metric and those within it take this process for the only one."""
    parts = _singles(metric)
    before = [part.distributed_available_fn for part in parts]
    try:
        for part in parts:
            part.distributed_available_fn = _nobody_else
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function


def _singles(metric: Any) -> list[Any]:
    """Return a metric and those within it, or those of a collection."""
    single = sys.modules["torchmetrics"].Metric
    return [part for part in metric.modules() if isinstance(part, single)]


def _nobody_else() -> bool:
    return False
