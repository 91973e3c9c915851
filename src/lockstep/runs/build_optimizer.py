"""Constructing the optimizer and the scheduler that a config names."""

import math
import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.data import Stream
from lockstep.engine.plateau import ReduceLROnPlateau
from lockstep.engine.schedules import make_schedule, parameter_groups
from lockstep.engine.state_file import Scheduler
from lockstep.errors import ConfigError
from lockstep.runs.config import Config
from lockstep.runs.importing import call_object, import_object

PLATEAU = "plateau"
"""The name of the scheduler that is a callback, because it follows a metric."""


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Construct the optimizer over the trained parameters, in the groups of the config."""
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


def build_plateau(config: Config, optimizer: Optimizer) -> ReduceLROnPlateau | None:
    """Construct the callback that lowers the learning rate by a metric; None without one."""
    if config.scheduler != PLATEAU:
        return None
    try:
        return ReduceLROnPlateau(optimizer, **config.scheduler_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler is {PLATEAU!r}, which cannot be used: {error} (LS807)") from error
