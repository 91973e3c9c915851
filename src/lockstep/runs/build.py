"""Constructing what a config names: model, data, loss, optimizer, scheduler, metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from lockstep.data import ShardedLoader, Stream, as_stream
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine import Loss, Metric, Trainer
from lockstep.engine.arguments import check_scheduler
from lockstep.engine.averaging import AveragedWeights
from lockstep.engine.callbacks import Callback
from lockstep.engine.restoring import Stateful
from lockstep.engine.state_file import Scheduler
from lockstep.engine.stopping import MaxSteps
from lockstep.errors import ConfigError
from lockstep.processes.reproducibility import seed_generators, set_deterministic
from lockstep.runs.build_callbacks import build_callbacks
from lockstep.runs.build_data import build_collate, build_lengths, build_weights
from lockstep.runs.build_loss import as_loss, build_criterion
from lockstep.runs.build_metrics import build_metrics
from lockstep.runs.build_optimizer import build_optimizer, build_scheduler
from lockstep.runs.config import Config
from lockstep.runs.data_sets import preferred_set, split_sets
from lockstep.runs.importing import call_object, import_object
from lockstep.shards import derive_seed

_DRY_STEPS = 2
"""Steps of a dry run, and batches of each of its evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The objects that a config names."""

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
    """The sets that are evaluated, by name."""
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
    """Return the data of a dry run, or of a run that is to overfit."""
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


def _build_data(config: Config) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    """Return the training set, and the sets to evaluate by name."""
    return split_sets("data", config.data, call_object("data", import_object("data", config.data), **config.data_args))


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
            persistent_workers=config.loader_workers > 0,  # the data set does not change between epochs
            pin_memory=is_asynchronous(device),
        )
    except (TypeError, ValueError) as error:
        name = "train" if shuffle else "test"
        raise ConfigError(
            f"data is {config.data!r}, whose {name} set cannot be used: {error} "
            "The function returns (train, test), or (train, None). (LS806)"
        ) from error
