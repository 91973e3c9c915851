"""Means over a data set, every sample counted once, and statistics of BatchNorm for averaged weights.

Both have the same bits on any number of workers. A layer's statistics are those of its inputs, which are others with
averaged weights. They are computed anew in one pass over the data: the mean of what each slice would have added to them
in training, weighted by the slice's samples.
"""

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Self, SupportsFloat, final

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.data import OTHER_DATA, ShardedBatch, ShardedLoader, Slice
from lockstep.data.keyed import generators_of_training
from lockstep.devices.transfer import to_device
from lockstep.engine.averaging import weights_in_place
from lockstep.engine.batches import check_world, gather_results
from lockstep.engine.buffers import BufferSnapshot, buffer_parts
from lockstep.engine.first_steps import FirstEvaluation
from lockstep.engine.networks import evaluation_mode, find_networks, networks_walk
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import seed_slice
from lockstep.engine.user_function import UserFunction
from lockstep.means import Mean
from lockstep.processes.reproducibility import reseed_generators
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.recording import EventKind, own_recorder
from lockstep.shards import derive_seed
from lockstep.torch_private.modules import TorchsSyncBatchNorm, tree_map_only

MetricValues = tuple[float | Tensor, float | Tensor] | Mapping[str, tuple[float | Tensor, float | Tensor]]
Metric = Callable[[nn.Module, Any], MetricValues]
"""`metric(model, batch)`: a `Mean` of a slice, or a pair of sum and count, or several by name."""
Slices = Callable[[ShardedBatch, Slice], MetricValues]
Forward = Callable[[nn.Module, Any], object]
Sums = dict[str, Tensor]
_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, TorchsSyncBatchNorm)
_PURPOSE = "Trainer.evaluate"
_STATISTICS_PURPOSE = "Trainer.update_batchnorm"


def read_values(found: Any) -> Mapping[str, float]:
    if isinstance(found, Mapping):
        return {name: value.value if isinstance(value, Mean) else _as_number(value) for name, value in found.items()}
    return {"metric": _as_number(found)}


def _as_number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return value


@torch.no_grad()
def evaluate(
    state: RunState,
    world: World,
    loader: ShardedLoader,
    metric: Metric | Any,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> Any:
    """Sum a metric over a data set (collective); `Trainer.evaluate` says what it returns and raises."""
    if not isinstance(loader, ShardedLoader):
        raise TypeError(
            f"evaluate was given a {type(loader).__name__}, expected a ShardedLoader: it counts each sample once "
            "over all workers. Make one of the data set. (LS528)"
        )
    function = _predict if is_torchmetrics(metric) else metric
    with own_recorder().during(EventKind.EVALUATING), _calls_with(state, weights, function) as calls:
        if is_torchmetrics(metric):
            return update_in_order(metric, loader, calls, world)
        state.findings.num_evaluations += 1
        if state.findings.num_evaluations > state.num_verified:
            return sum_metric(loader, calls, world)
        first = FirstEvaluation(state.model, metric, calls)
        found = sum_metric(loader, first, world)
        if first.verify(world):
            state.findings.num_evaluations = state.num_verified
        return found


@contextmanager
def _calls_with(
    state: RunState, weights: Mapping[str, Tensor], function: Any, *, is_training: bool = False
) -> Iterator["SliceCalls"]:
    """Let a function be called for slices with these weights; of the run nothing is changed (local)."""
    called = CalledModel(
        model=state.model, kept=state.kept_modules(), device=state.device, seed=state.seed, autocast=state.autocast
    )
    calls = SliceCalls(called, function, is_training=is_training)
    try:
        with evaluation_mode(state.model), weights_in_place(state.model, weights), calls.changing_nothing():
            yield calls
    finally:  # what a worker has drawn depends on which shards it ran
        reseed_generators(derive_seed("evaluated", state.seed, state.cursor.epoch, state.cursor.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledModel:
    """A model and what calls of it depend on."""

    model: nn.Module
    kept: nn.Module
    """What has the buffers that each call begins with: the model, and what belongs to it."""
    device: torch.device
    seed: int
    autocast: Callable[[], AbstractContextManager[object]]


@final
class SliceCalls:
    """Calls a function for slices, each from the same mode, buffers and random states, whatever this worker ran."""

    def __init__(self, called: CalledModel, function: Metric | Any, *, is_training: bool = False) -> None:
        self._called = called
        self._is_training = is_training
        self._function = UserFunction(function, generators_of_training(called.model, function))
        # Modules without parameters, that the function alone uses, are where it counts something.
        found = find_networks(networks_walk([function]), called.model).values()
        used = [each for each in found if next(each.parameters(), None) is not None]
        whole = nn.ModuleList([called.kept, *used])
        self._buffers = BufferSnapshot(buffer_parts(whole))
        self._modes = {module: module.training for module in whole.modules()}

    @contextmanager
    def changing_nothing(self) -> Iterator[Self]:
        self._function.generators.save()
        try:
            with self._buffers.kept():
                yield self
        finally:
            self._function.generators.restore()
            self._put_back_modes()

    def _put_back_modes(self) -> None:
        for module, training in self._modes.items():
            module.training = training

    def __call__(self, batch: ShardedBatch, part: Slice) -> Any:
        def begin() -> Any:
            self._put_back_modes()
            self._called.model.train(self._is_training)
            self._buffers.put_back()
            seed_slice("evaluate", self._called.seed, batch, part)
            return to_device(part.data, self._called.device)

        with self._called.autocast():
            return self._function(self._called.model, begin(), begin_again=begin)


def _predict(model: nn.Module, data: Any) -> tuple[Any, Any]:
    if not (isinstance(data, tuple | list) and len(data) == 2):  # noqa: PLR2004 - input and target
        raise TypeError(
            f"The loader's batches are of type {type(data).__name__}, and an object of torchmetrics needs pairs "
            "(input, target). For others give a function metric(model, batch). (LS528)"
        )
    return model(data[0]), data[1]


def sum_metric(loader: ShardedLoader, values_of: Slices, world: World) -> dict[str, Mean]:
    """Add up what a metric gives for every slice of a data set: per shard, then in shard order (collective)."""

    def add(sums: dict[str, Mean], batch: ShardedBatch, part: Slice) -> None:
        values = values_of(batch, part)
        for name, value in (values if isinstance(values, Mapping) else {"metric": values}).items():
            new = _read_mean(name, value)
            sums[name] = add_means([sums[name], new]) if name in sums else new

    ordered = _sum_by_shard(loader, world, add, _PURPOSE)
    names = list(dict.fromkeys(name for shard in ordered for name in shard))
    means = {name: add_means(shard[name] for shard in ordered if name in shard) for name in names}
    for name in [name for name, mean in means.items() if not mean.weight] if world.rank == 0 else []:
        warnings.warn(
            f"The metric {name} has counted nothing: its weight was 0 for every sample of the data set, so its value "
            "is NaN. Return how many samples (tokens, pixels) each sum is of. (LS528)",
            stacklevel=stacklevel_of_user(),
        )
    return means


def _sum_by_shard(
    loader: ShardedLoader,
    world: World,
    add: Callable[[dict[str, Any], ShardedBatch, Slice], None],
    purpose: str,
    *,
    each_once: bool = True,
) -> list[dict[str, Any]]:
    """Return the sums of each shard, in shard order, to which `add` has added each of its slices (collective)."""

    def compute() -> tuple[str, int, dict[int, dict[str, Any]]]:
        sums: dict[int, dict[str, Any]] = {}
        content = 0
        for batch in loader.fixed_assignment_epoch(each_once=each_once):
            check_world(batch, world)
            content = batch.identity
            for part in batch.slices:
                add(sums.setdefault(part.shard, {}), batch, part)
        return loader.source, content, sums

    found = gather_results(world, compute, purpose)
    _check_same_loader([source for source, _, _ in found])
    _check_same_content([content for _, content, _ in found])
    by_shard = {shard: sums for _, _, gathered in found for shard, sums in gathered.items()}
    assert len(by_shard) == sum(len(gathered) for _, _, gathered in found), "a shard was run by two workers"
    return [by_shard[shard] for shard in sorted(by_shard)]


def _read_mean(name: str, value: Any) -> Mean:
    is_pair = isinstance(value, tuple | list) and len(value) == 2  # noqa: PLR2004 - sum and weight
    if not is_pair or not all(_is_number(part) for part in value):
        found = f"({', '.join(map(_describe, value))})" if isinstance(value, tuple | list) else _describe(value)
        what = "The metric" if name == "metric" else f"The metric {name}"
        raise TypeError(
            f"{what} returned {found}, expected a pair: a sum over the slice, and its weight (how many samples, say). "
            "A mean of its own would count small slices too much. (LS528)"
        )
    total, weight = map(float, value)
    if weight < 0 or math.isnan(weight):
        raise ValueError(f"The weight of the metric {name} is {weight} for a slice, expected zero or more. (LS528)")
    return Mean(total, weight)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def add_means(means: Iterable[Mean]) -> Mean:
    total = weight = 0.0
    for mean in means:
        total += float(mean.total)
        weight += float(mean.weight)
    return Mean(total, weight)


def _check_same_content(contents: Sequence[int | None]) -> None:
    odd = next((rank for rank, content in enumerate(contents) if content != contents[0]), None)
    if odd is not None:
        raise ValueError(f"The workers evaluate on different data: rank {odd}'s are not rank 0's. {OTHER_DATA} (LS528)")


def _check_same_loader(sources: Sequence[str]) -> None:
    odd = next((rank for rank, source in enumerate(sources) if source != sources[0]), None)
    if odd is not None:
        raise ValueError(
            f"The workers evaluate on different data: rank {odd}'s loader is of {sources[odd]}, and rank 0's of "
            f"{sources[0]}. Make the loader with the same arguments on every rank. (LS528)"
        )


def is_torchmetrics(metric: object) -> bool:
    """Whether `metric` is an object of torchmetrics, which is imported only by the user."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, module.Metric | module.MetricCollection)


def update_in_order(
    metric: Any, loader: ShardedLoader, update_of: Callable[[ShardedBatch, Slice], tuple[Any, Any]], world: World
) -> Any:
    """Let an object of torchmetrics see all predictions in the order of the data; return what it computes (collective).

    It is updated on rank 0 alone, which gets the others' predictions; its own synchronisation would add up in an order
    that depends on the number of workers. It is reset before, and left as it is afterwards. `update_of` returns
    predictions and target.
    """
    metric.reset()
    _check_same_loader(gather_results(world, lambda: loader.source, _PURPOSE))
    device = next(part.device for part in _singles(metric))
    batches = loader.fixed_assignment_epoch()
    found: list[tuple[int | None, list[tuple[int, Any]]]] = []

    def update() -> None:
        seen = itertools.chain.from_iterable(predictions for _, predictions in found)
        for _, (prediction, target) in sorted(seen, key=itemgetter(0)):
            metric.update(*tree_map_only(Tensor, lambda tensor: tensor.to(device), (prediction, target)))

    def predict() -> tuple[int | None, list[tuple[int, Any]]]:
        if world.rank == 0:
            update()  # with those of the step before: an error in it is raised with this step's
        batch = next(batches, None)
        if batch is None:
            return None, []
        check_world(batch, world)
        mine = [(part.shard, update_of(batch, part)) for part in batch.slices]
        return batch.identity, mine if world.group is None else tree_map_only(Tensor, Tensor.cpu, mine)

    def compute() -> Any:
        if world.rank != 0:
            return None
        with _without_synchronisation(metric):
            return tree_map_only(Tensor, Tensor.cpu, metric.compute())

    while True:
        found = gather_results(world, predict, _PURPOSE)
        _check_same_content([content for content, _ in found])
        if found[0][0] is None:
            break
    return gather_results(world, compute, _PURPOSE)[0]


@contextmanager
def _without_synchronisation(metric: Any) -> Iterator[None]:
    parts = _singles(metric)
    before = [part.distributed_available_fn for part in parts]
    try:
        for part in parts:
            part.distributed_available_fn = lambda: False
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function


def _singles(metric: Any) -> list[Any]:
    single = sys.modules["torchmetrics"].Metric
    return [part for part in metric.modules() if isinstance(part, single)]


def accuracy(output: Tensor, target: Tensor, *, ignore_index: int | None = None) -> Mean:
    """Count the predictions that are right.

        def metric(model, batch):
            inputs, labels = batch
            return {"accuracy": ls.accuracy(model(inputs), labels)}

        print(trainer.evaluate(loader, metric)["accuracy"])

    Args:
        output: Scores, [N, C, ...] as `torch.nn.functional.cross_entropy` takes them, or [N, ..., C].
        target: Class numbers, [N, ...].
        ignore_index: The class number of targets that do not count, as padding; that of the loss, say -100.

    Returns:
        How many are right, and of how many.

    Raises:
        ValueError: The shapes do not go together, or in two ways.
    """
    dim = _class_dim(output, target)
    if dim is None:
        raise ValueError(
            f"Scores of shape {list(output.shape)} and targets of shape {list(target.shape)} do not go together, "
            "or in two ways; expected scores [N, C, ...] or [N, ..., C] for targets [N, ...]. (LS528)"
        )
    right = output.argmax(dim) == target
    if ignore_index is None:
        return Mean(float(right.sum()), target.numel())
    counted = target != ignore_index
    return Mean(float((right & counted).sum()), int(counted.sum()))


def has_classes(output: object, target: object) -> bool:
    """Return whether `accuracy` can be asked: whole-number targets, and a dimension of scores for the classes."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return False
    return target.dtype != torch.bool and _class_dim(output, target) is not None


def _class_dim(output: Tensor, target: Tensor) -> int | None:
    if output.ndim != target.ndim + 1:
        return None
    fitting = {dim for dim in (1, output.ndim - 1) if output.shape[:dim] + output.shape[dim + 1 :] == target.shape}
    # Both fit when, say, a text is as long as its vocabulary is large: better no answer than a wrong one.
    return fitting.pop() if len(fitting) == 1 else None


def has_batchnorm(model: nn.Module) -> bool:
    return any(True for _ in _layers(model))


@torch.no_grad()
def compute_statistics(
    state: RunState, world: World, loader: ShardedLoader, weights: Mapping[str, Tensor], forward: Forward
) -> dict[str, Tensor]:
    """Return running means and variances by the names of the model's buffers (collective); nothing is changed."""
    model = state.model
    with _calls_with(state, weights, forward, is_training=True) as calls:

        def add(sums: Sums, batch: ShardedBatch, part: Slice) -> None:
            with _added_to(sums, model):
                calls(batch, part)

        by_shard = _sum_by_shard(loader, world, add, _STATISTICS_PURPOSE, each_once=False)
    total: Sums = {}
    for sums in by_shard:
        for name, value in sums.items():
            total[name] = total[name] + value if name in total else value
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        name: (value / total[f"{name.rpartition('.')[0]} weight"]).to(buffers[name])
        for name, value in total.items()
        if name in buffers
    }


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):  # an average has all names of a layer
        if isinstance(module, _BATCHNORM) and module.track_running_stats and module.running_mean is not None:
            yield name, module


@contextmanager
def _added_to(sums: Sums, model: nn.Module) -> Iterator[None]:
    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value.cpu() if name in sums else value.cpu()

    def look(prefix: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().double()
            dims = [dim for dim in range(values.ndim) if dim != 1]
            count = values.numel() // values.shape[1]
            add(f"{prefix}running_mean", values.mean(dims) * len(values))
            add(f"{prefix}running_var", values.var(dims, unbiased=count > 1) * len(values))
            add(f"{prefix.removesuffix('.')} weight", torch.tensor(float(len(values)), dtype=torch.float64))

        return hook

    handles = [module.register_forward_pre_hook(look(f"{name}." if name else "")) for name, module in _layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
