"""Constructing what a config names: model, data, loss, optimizer, scheduler, metric."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.data import ShardedLoader
from lockstep.devices.asynchrony import is_asynchronous
from lockstep.engine import Loss, Metric, Trainer
from lockstep.engine.arguments import can_be_called, check_scheduler
from lockstep.engine.evaluation import MetricValues
from lockstep.engine.metrics import accuracy, has_classes
from lockstep.engine.state_file import Scheduler
from lockstep.errors import ConfigError
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.runs.config import Config
from lockstep.runs.importing import call_object, import_object
from lockstep.shards import derive_seed
from lockstep.torch_private import tree_leaves

Criterion = Callable[[Any, Any], Tensor]
"""A loss as a config names it: called with (output, target)."""
Autocast = Callable[[], AbstractContextManager[object]]
"""Returns the autocast context in which model and loss are computed."""
Counter = Callable[[Any, Any], tuple[float, float]]
"""A metric as a config names it: called with (output, target), returns a sum and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The objects that a config names."""

    trainer: Trainer
    """The trainer of model, optimizer and loss; it steps the scheduler if `scheduler_interval` is "step"."""
    scheduler: Scheduler | None
    """The scheduler, whatever its interval."""
    metric: Metric
    """Loss, and accuracy or the config's own metric."""
    train: ShardedLoader
    """Shuffled."""
    test: ShardedLoader | None
    """In order."""


def build_parts(config: Config, device: torch.device) -> RunParts:
    """Construct everything that a config names (collective: every worker calls).

    Raises:
        ConfigError: An object cannot be imported or constructed, or has the wrong type.
    """
    set_deterministic(config.deterministic)
    seed_generators(derive_seed("build", config.seed))
    train_set, test_set = _build_data(config)
    # Seeded again, so that random numbers drawn for the data do not change the model.
    seed_generators(derive_seed("model", config.seed))
    model = _build_model(config, device)
    optimizer = _build_optimizer(config, model)
    scheduler = _build_scheduler(config, optimizer)
    criterion = _build_criterion(config, device)
    autocast = _build_autocast(config, device)
    trainer = _build_trainer(config, model, optimizer, scheduler, _as_loss(criterion, autocast))
    return RunParts(
        trainer=trainer,
        scheduler=scheduler,
        metric=_as_metric(criterion, _build_metric(config), autocast),
        train=_build_loader(config, train_set, device, shuffle=True),
        test=None if test_set is None else _build_loader(config, test_set, device, shuffle=False),
    )


def _build_trainer(
    config: Config, model: nn.Module, optimizer: Optimizer, scheduler: Scheduler | None, loss: Loss
) -> Trainer:
    device_type = next(model.parameters()).device.type
    try:
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        return Trainer(
            model,
            optimizer,
            loss=loss,
            num_shards=config.num_shards,
            seed=config.seed,
            scheduler=scheduler if config.scheduler_interval == "step" else None,
            scaler=torch.amp.GradScaler(device_type) if config.precision == "float16" else None,
            max_grad_norm=config.max_grad_norm,
            nonfinite=config.nonfinite,
            balance=config.balance,
            deterministic=config.deterministic,
            on_worker_loss=config.on_worker_loss,
            min_workers=config.min_workers,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The config cannot be used for training: {error}") from error


def _build_model(config: Config, device: torch.device) -> nn.Module:
    model = call_object("model", import_object("model", config.model), **config.model_args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {config.model!r}, which made a value of type {type(model).__name__}, not a torch.nn.Module."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model is {config.model!r}, which has no parameter that requires a gradient.")
    return model.to(device)


def _build_data(config: Config) -> tuple[Dataset[Any], Dataset[Any] | None]:
    data = call_object("data", import_object("data", config.data), **config.data_args)
    if isinstance(data, tuple | list) and any(isinstance(part, Dataset) for part in data):
        if len(data) != 2:  # noqa: PLR2004 - (train, test)
            raise ConfigError(f"data is {config.data!r}, which returned {len(data)} data sets; expected (train, test).")
        return data[0], data[1]
    return data if isinstance(data, tuple) and len(data) == 2 else (data, None)  # noqa: PLR2004


def _build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = call_object(
        "optimizer", import_object("optimizer", config.optimizer), trainable, **config.optimizer_args
    )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, which made a value of type {type(optimizer).__name__}, "
            "not a torch.optim.Optimizer."
        )
    return optimizer


def _build_scheduler(config: Config, optimizer: Optimizer) -> Scheduler | None:
    if config.scheduler is None:
        return None
    scheduler = call_object(
        "scheduler", import_object("scheduler", config.scheduler), optimizer, **config.scheduler_args
    )
    made: Scheduler = scheduler
    return made


def _build_criterion(config: Config, device: torch.device) -> Criterion:
    loss = import_object("loss", config.loss)
    if inspect.isclass(loss):
        made: Criterion = call_object("loss", loss, **config.loss_args)
        return made.to(device) if isinstance(made, nn.Module) else made
    if not callable(loss):
        raise ConfigError(f"loss is {config.loss!r}, a {type(loss).__name__}, expected a function or a class.")
    if not can_be_called(loss, None, None, **config.loss_args):
        raise ConfigError(
            f"loss is {config.loss!r}, which cannot be called with (output, target) and loss_args {config.loss_args}: "
            f"its parameters are {inspect.signature(loss)}."
        )
    return lambda output, target: loss(output, target, **config.loss_args)


def _build_metric(config: Config) -> Counter | None:
    if config.metric is None:
        return None
    metric = import_object("metric", config.metric)
    if not callable(metric):
        raise ConfigError(f"metric is {config.metric!r}, a {type(metric).__name__}, expected a function.")
    made: Counter = metric
    return made


def _build_loader(config: Config, dataset: Dataset[Any], device: torch.device, *, shuffle: bool) -> ShardedLoader:
    try:
        return ShardedLoader(
            dataset,
            batch_size=config.batch_size,
            num_shards=config.num_shards,
            seed=config.seed,
            shuffle=shuffle,
            drop_last=config.drop_last and shuffle,  # a test set is counted whole
            num_workers=config.loader_workers,
            persistent_workers=config.loader_workers > 0,  # the data set does not change between epochs
            pin_memory=is_asynchronous(device),
        )
    except (TypeError, ValueError) as error:
        name = "train" if shuffle else "test"
        raise ConfigError(
            f"data is {config.data!r}, whose {name} set cannot be used: {error} "
            "The function returns (train, test), or (train, None)."
        ) from error


def _build_autocast(config: Config, device: torch.device) -> Autocast:
    dtype = getattr(torch, config.precision)
    return partial(torch.autocast, device.type, dtype, enabled=dtype is not torch.float32)


def _as_loss(criterion: Criterion, autocast: Autocast) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = _input_and_target(batch)
        with autocast():
            return criterion(model(inputs), target)

    return loss


def _as_metric(criterion: Criterion, metric: Counter | None, autocast: Autocast) -> Metric:
    def evaluate(model: nn.Module, batch: Any) -> MetricValues:
        inputs, target = _input_and_target(batch)
        with autocast():
            output = model(inputs)
            loss = criterion(output, target)
        num_samples = _count_samples(target)
        values: dict[str, tuple[float | Tensor, float]] = {"loss": (loss.double() * num_samples, num_samples)}
        if metric is not None:
            values[getattr(metric, "__name__", "metric")] = metric(output, target)
        elif has_classes(output, target):
            values["accuracy"] = accuracy(output, target)
        return values

    return evaluate


def _count_samples(target: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not sizes:
        raise ConfigError(
            "data yields targets without a tensor in them, expected one with the samples along dimension 0."
        )
    return sizes[0]


def _input_and_target(batch: Any) -> tuple[Any, Any]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):  # noqa: PLR2004
        raise ConfigError(
            f"data yields samples that collate to a {type(batch).__name__}, expected pairs (input, target). "
            "For other batches write a training loop with ls.Trainer, whose loss gets the whole batch."
        )
    return batch[0], batch[1]
