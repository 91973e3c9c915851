"""Constructing what a config names: model, data, loss, optimizer, scheduler, callbacks, metrics."""

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from lockstep.data import ShardedLoader, Stream, as_stream
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine import Loss, Metric, Trainer
from lockstep.engine.arguments import can_be_called, check_scheduler
from lockstep.engine.averaging import EMA, SWA, AveragedWeights
from lockstep.engine.callbacks import Callback, check_callback
from lockstep.engine.evaluation import MetricValues, accuracy, has_classes
from lockstep.engine.schedules import ReduceLROnPlateau, make_schedule, parameter_groups
from lockstep.engine.state_parts import Scheduler, Stateful
from lockstep.engine.stopping import EarlyStopping, MaxSteps, MaxTime
from lockstep.errors import ConfigError
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.runs.build_data import build_collate, build_lengths, build_weights, preferred_set, split_sets
from lockstep.runs.config import Config, NamedObject, parse_seconds
from lockstep.runs.importing import call_object, import_object
from lockstep.shards import derive_seed
from lockstep.torch_private.modules import tree_leaves

PLATEAU = "plateau"
"""The name of the scheduler that is a callback, because it follows a metric."""
WITHOUT_CALLBACKS: dict[str, Any] = {
    "callbacks": [],
    "early_stopping": None,
    "ema": None,
    "swa": None,
    "max_time": None,
}
"""What a config is changed to where no run is trained to its end; `max_steps` stays, on which a schedule depends."""
_DRY_STEPS = 2
"""Steps of a dry run, and batches of each of its evaluations."""
_PAIRWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_PAIRWISE_FUNCTIONS = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)

Criterion = Callable[[Any, Any], Tensor]
"""A loss as a config names it: called with (output, target)."""
Counter = Callable[[Any, Any], tuple[float, float]]
"""A metric as a config names it: called with (output, target), returns a sum and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    trainer: Trainer
    """The trainer of model, optimizer and loss; it steps the scheduler if `scheduler_interval` is "step"."""
    scheduler: Scheduler | None
    """The scheduler, whatever its interval."""
    metric: Metric
    """Loss, and accuracy or the config's own metrics."""
    collection: Any
    """Metrics of torchmetrics; None without any."""
    averages: Mapping[str, AveragedWeights]
    """Averages of the weights, which are evaluated too, by the names that are put before those of the metrics."""
    train: ShardedLoader
    """Shuffled."""
    states: Mapping[str, Stateful]
    """What has a state besides the trainer, by name: the loader of a stream."""
    datasets: Mapping[str, Dataset[Any]]
    evaluated: Mapping[str, ShardedLoader]
    """The sets that are evaluated after each epoch, by name; each in order."""

    @property
    def test(self) -> ShardedLoader | None:
        """The test set, if there is one; else the first set that is evaluated."""
        found: ShardedLoader | None = preferred_set(None, self.evaluated)
        return found


def build_parts(config: Config, device: torch.device) -> RunParts:
    """Construct everything that a config names (collective: every worker calls)."""
    set_deterministic(config.deterministic)
    seed_generators(derive_seed("build", config.seed))
    train_set, others = _limit_data(config, *_find_streams(config, *_build_data(config)))
    # Seeded again, so that random numbers drawn for the data do not change the model.
    seed_generators(derive_seed("model", config.seed))
    model = _build_model(config, device)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, train_set)
    criterion = build_criterion(config, device)
    metrics = build_metrics(config, criterion, device)
    callbacks = build_callbacks(config, optimizer)
    if config.dry_run:
        callbacks.append(MaxSteps(_DRY_STEPS))
    trainer = _build_trainer(config, model, optimizer, scheduler, as_loss(criterion), callbacks)
    train = _build_loader(
        config,
        train_set,
        device,
        shuffle=True,
        weights=build_weights(config, train_set),
        lengths=build_lengths(config, train_set),
    )
    held = trainer.moments.callbacks
    named = dict(zip(held.names, held.all(), strict=True))  # as in a checkpoint: a second EMA is EMA-2
    return RunParts(
        trainer=trainer,
        scheduler=scheduler,
        metric=metrics.function,
        collection=metrics.collection,
        averages={name.lower(): each for name, each in named.items() if isinstance(each, AveragedWeights)},
        train=train,
        states={"loader": train} if isinstance(train_set, Stream) else {},
        datasets=others,
        evaluated={name: _build_loader(config, each, device, shuffle=False) for name, each in others.items()},
    )


def _build_data(config: Config) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    return split_sets("data", config.data, call_object("data", import_object("data", config.data), **config.data_args))


def _find_streams(
    config: Config, train: Dataset[Any], others: dict[str, Dataset[Any]]
) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    """Return the data sets, those that are streams as such."""
    found: dict[str, Dataset[Any]] = {}
    for name, each in {"train": train, **others}.items():
        try:
            found[name] = as_stream(each) or each
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data is {config.data!r}, whose {name} set cannot be used: {error} (LS806)") from error
    return found.pop("train"), found


def _limit_data(
    config: Config, train: Dataset[Any], others: dict[str, Dataset[Any]]
) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    if config.overfit is not None:
        train = first_samples(train, config.overfit * config.batch_size)
        others = dict.fromkeys(others or ["test"], train)
    if config.dry_run:
        others = {name: first_samples(each, _DRY_STEPS * config.batch_size) for name, each in others.items()}
    return train, others


def first_samples(data: Dataset[Any], number: int) -> Dataset[Any]:
    if isinstance(data, Stream):
        return data.first(number)
    sized: Any = data
    return Subset(data, range(min(number, len(sized))))


def _build_model(config: Config, device: torch.device) -> nn.Module:
    model = call_object("model", import_object("model", config.model), **config.model_args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {config.model!r}, which made a value of type {type(model).__name__}, not a "
            "torch.nn.Module. (LS806)"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model is {config.model!r}, which has no parameter that requires a gradient. (LS806)")
    return model.to(device)


def _build_trainer(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Scheduler | None,
    loss: Loss,
    callbacks: Sequence[Callback],
) -> Trainer:
    try:
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        return Trainer(
            model,
            optimizer,
            loss=loss,
            num_shards=config.total_shards,
            seed=config.seed,
            scheduler=None if config.steps_scheduler_per_epoch else scheduler,
            precision=config.precision,
            compile=config.compile,
            track_grad_norm=config.track_grad_norm,
            max_grad_norm=config.max_grad_norm,
            nonfinite=config.nonfinite,
            balance=config.balance,
            deterministic=config.deterministic,
            on_worker_loss="continue"
            if config.continues_on({each.device.type for each in model.parameters()})
            else "stop",
            min_workers=config.min_workers,
            callbacks=callbacks,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The config cannot be used for training: {error} (LS805)") from error


def _build_loader(
    config: Config,
    dataset: Dataset[Any],
    device: torch.device,
    *,
    shuffle: bool,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
) -> ShardedLoader:
    try:
        return ShardedLoader(
            dataset,
            batch_size=config.batch_size,
            num_shards=config.total_shards,
            seed=config.seed,
            shuffle=shuffle,
            weights=weights,
            lengths=lengths,
            collate_fn=build_collate(config),
            drop_last=config.drop_last and shuffle,  # a test set is counted whole
            num_workers=config.loader_workers,
            persistent_workers=config.loader_workers > 0,
            pin_memory=is_asynchronous(device),
        )
    except (TypeError, ValueError) as error:
        name = "train" if shuffle else "test"
        raise ConfigError(
            f"data is {config.data!r}, whose {name} set cannot be used: {error} "
            "The function returns (train, test), or (train, None). (LS806)"
        ) from error


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.param_groups or config.no_decay:
        try:
            trained = parameter_groups(model, config.param_groups, no_decay=config.no_decay)
        except ValueError as error:
            raise ConfigError(f"param_groups cannot be used: {error} (LS807)") from error
    optimizer = call_object("optimizer", import_object("optimizer", config.optimizer), trained, **config.optimizer_args)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, which made a value of type {type(optimizer).__name__}, "
            "not a torch.optim.Optimizer. (LS806)"
        )
    for pattern, options in config.param_groups.items():
        unknown = [name for name in options if name not in optimizer.defaults]
        if unknown:
            raise ConfigError(
                f"param_groups gives {pattern!r} the option {', '.join(unknown)}, and {type(optimizer).__name__} has "
                f"{', '.join(optimizer.defaults)}. (LS807)"
            )
    return optimizer


def build_scheduler(config: Config, optimizer: Optimizer, train_set: Any) -> Scheduler | None:
    """Construct the scheduler, which the trainer or the loop steps; None without one, or if it is a callback."""
    if config.schedule is not None:
        steps = _count_steps(config, train_set)
        try:
            return make_schedule(
                optimizer, config.schedule, num_steps=steps, warmup=config.warmup, **config.scheduler_args
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scheduler is {config.schedule!r}, which cannot be used: {error} (LS807)") from error
    if config.scheduler in {None, PLATEAU}:
        return None
    scheduler: Scheduler = call_object(
        "scheduler", import_object("scheduler", str(config.scheduler)), optimizer, **config.scheduler_args
    )
    return scheduler


def _count_steps(config: Config, train_set: Any) -> int:
    if isinstance(train_set, Stream) and train_set.steps_per_epoch is not None:
        return min(config.epochs * train_set.steps_per_epoch, config.max_steps or sys.maxsize)
    samples = train_set.num_records if isinstance(train_set, Stream) else None
    if samples is None and hasattr(train_set, "__len__"):
        samples = len(train_set)
    if samples is None and isinstance(train_set, Stream):
        if config.max_steps is not None:
            return config.max_steps
        if config.schedule == "constant" and config.warmup >= 1:
            return int(config.warmup) + 1  # the rate is constant from there on, however long the run is
        is_alone = config.schedule == "constant"
        what = "warmup, a part of the run," if is_alone else f"scheduler is {config.schedule!r}, which"
        raise ConfigError(
            f"{what} needs the number of steps, and the training set is a stream whose length is not known. Give "
            "ls.Stream the lengths of its parts or steps_per_epoch, or set max_steps"
            + ("; or give warmup a number of steps. (LS409)" if is_alone else ". (LS409)")
        )
    if samples is None:
        raise ConfigError(f"data is {config.data!r}, whose train set has no len(): a loader needs it. (LS806)")
    per_epoch = samples / config.batch_size
    steps = config.epochs * (math.floor(per_epoch) if config.drop_last else math.ceil(per_epoch))
    return min(steps, config.max_steps or steps)


def build_plateau(config: Config, optimizer: Optimizer) -> ReduceLROnPlateau | None:
    if config.scheduler != PLATEAU:
        return None
    try:
        return ReduceLROnPlateau(optimizer, **config.scheduler_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler is {PLATEAU!r}, which cannot be used: {error} (LS807)") from error


def build_callbacks(config: Config, optimizer: Optimizer) -> list[Callback]:
    """Return the callbacks of a config: what averages first, then the user's own, then what looks at metrics."""
    found: list[Callback] = []
    if config.ema is not None:
        found.append(EMA(config.ema.decay))
    if config.swa is not None:
        if config.swa.start_epoch >= config.epochs:
            raise ConfigError(
                f"swa.start_epoch is {config.swa.start_epoch} and epochs is {config.epochs}: the mean would be of no "
                f"epoch. Epochs count from 0: use at most {config.epochs - 1}. (LS805)"
            )
        found.append(SWA(config.swa.start_epoch))
    found += [_build_own(each) for each in config.callbacks]
    plateau = build_plateau(config, optimizer)
    if plateau is not None:
        found.append(plateau)
    if config.early_stopping is not None:
        try:
            found.append(
                EarlyStopping(
                    config.early_stopping.metric,
                    patience=config.early_stopping.patience,
                    min_delta=config.early_stopping.min_delta,
                    mode=config.early_stopping.mode,
                )
            )
        except ValueError as error:
            raise ConfigError(f"early_stopping cannot be used: {error} (LS805)") from error
    if config.max_steps is not None:
        found.append(MaxSteps(config.max_steps))
    if config.max_time is not None:
        found.append(MaxTime(parse_seconds(config.max_time)))
    return found


def build_named(key: str, named: NamedObject) -> Any:
    """Import an object that a config names in a list; call it with its arguments, if it is a class or has some."""
    path, arguments = next(iter(named.items())) if isinstance(named, dict) else (named, {})
    found = import_object(key, path)
    return call_object(key, found, **arguments) if arguments or isinstance(found, type) else found


def _build_own(named: NamedObject) -> Callback:
    made = build_named("callbacks", named)
    try:
        check_callback(made)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"callbacks names {named!r}: {error} (LS805)") from error
    callback: Callback = made
    return callback


def build_criterion(config: Config, device: torch.device) -> Criterion:
    loss = import_object("loss", config.loss)
    if inspect.isclass(loss):
        made: Criterion = call_object("loss", loss, **config.loss_args)
        criterion = made.to(device) if isinstance(made, nn.Module) else made
        return _with_shapes_compared(criterion) if isinstance(made, _PAIRWISE) else criterion
    if not callable(loss):
        raise ConfigError(f"loss is {config.loss!r}, a {type(loss).__name__}, expected a function or a class. (LS806)")
    if not can_be_called(loss, None, None, **config.loss_args):
        raise ConfigError(
            f"loss is {config.loss!r}, which cannot be called with (output, target) and loss_args {config.loss_args}: "
            f"its parameters are {inspect.signature(loss)}. (LS806)"
        )

    def call(output: Any, target: Any) -> Tensor:
        found: Tensor = loss(output, target, **config.loss_args)
        return found

    return _with_shapes_compared(call) if loss in _PAIRWISE_FUNCTIONS else call


def as_loss(criterion: Criterion) -> Loss:
    """Return a criterion as a loss function of the trainer: called with the model and a batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = input_and_target(batch)
        return criterion(model(inputs), target)

    return loss


def input_and_target(batch: Any) -> tuple[Any, Any]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):  # noqa: PLR2004
        raise ConfigError(
            f"data yields samples that collate to a {type(batch).__name__}, expected pairs (input, target). "
            "For other batches write a training loop with ls.Trainer, whose loss gets the whole batch. (LS808)"
        )
    return batch[0], batch[1]


def _with_shapes_compared(criterion: Callable[[Any, Any], Tensor]) -> Criterion:
    """Refuse an output and a target of other shapes: torch compares each of one with all of the other, and warns."""

    def compare(output: Any, target: Any) -> Tensor:
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape:
            raise ConfigError(
                f"The model returns outputs of shape {list(output.shape)} and data yields targets of shape "
                f"{list(target.shape)}. Of such shapes this loss compares each output with several targets. Let data "
                "yield targets of the shape of one output, such as target.unsqueeze(-1), or let the model return "
                "output.squeeze(-1). (LS806)"
            )
        return criterion(output, target)

    return compare


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
