"""The run that a config describes, in one worker: train, evaluate, save."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import load_checkpoint
from lockstep.errors import LossError
from lockstep.events import EpochFinished, Recorder, RunStarted, StepFinished
from lockstep.train.build import RunParts, build_parts
from lockstep.train.config import Config
from lockstep.train.environment import gather_facts, write_environment
from lockstep.train.fingerprint import Fingerprint
from lockstep.train.importing import call_object, import_object
from lockstep.train.keep import check_wanted
from lockstep.train.run_directory import restore_trainer
from lockstep.train.saving import RunSaver
from lockstep.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How a run ended."""

    digest: str
    """Digest of the parameters and buffers; the same on every worker."""
    fingerprint: Fingerprint
    """What the digest depends on besides code and data."""
    test: Mapping[str, float]
    """Mean of each metric over the test set."""
    num_test_samples: float
    """How many samples (or tokens) the accuracy, or else the loss, was counted over."""
    num_right: float | None
    """How many of them were predicted right, where accuracy applies."""
    finish: str | None
    """What the config's `finish` function returned, on rank 0."""


def fit(
    config: Config,
    *,
    device: torch.device,
    run_dir: Path,
    recorder: Recorder,
    resume_from: Path | None = None,
    code: Path | None = None,
) -> FitResult:
    """Train as `config` says (collective: every worker calls).

    Args:
        config: The run.
        device: Where this worker trains.
        run_dir: Where checkpoints go; rank 0 writes them, after every epoch, the last before this returns.
        recorder: Told what happens.
        resume_from: A checkpoint of this run to go on from.
        code: The folder of the user's code, whose commit is noted; None for the current one.

    Raises:
        ConfigError: Something that the config names cannot be found, made or used.
        CheckpointError: A checkpoint cannot be written or read.
        LossError: The loss is not finite.
    """
    parts = build_parts(config, device)
    trainer = parts.trainer
    if resume_from is not None:
        restore_trainer(trainer, parts.scheduler, load_checkpoint(resume_from), config)
    fingerprint = trainer.fingerprint()
    workers = gather_facts(trainer.world, device, fingerprint.device)
    if trainer.world.rank == 0:
        write_environment(run_dir, workers, fingerprint.to_dict(), code or Path())
    recorder.record(_describe_run(config, parts, device))
    if parts.test is None:
        check_wanted(config.keep_best, {})
    start = trainer.cursor
    saver = RunSaver(config, run_dir, recorder) if trainer.world.rank == 0 else None
    with saver or nullcontext():
        test = _train_epochs(config, parts, recorder, saver)
    if start.epoch >= config.epochs and parts.test is not None:
        test = trainer.evaluate(parts.test, parts.metric)
    counted = test.get("accuracy", test.get("loss"))
    return FitResult(
        digest=trainer.digest(),
        fingerprint=trainer.fingerprint(),
        test={name: mean.value for name, mean in test.items()},
        num_test_samples=counted.weight if counted is not None else 0,
        num_right=test["accuracy"].total if "accuracy" in test else None,
        finish=_finish(config, trainer),
    )


def _train_epochs(config: Config, parts: RunParts, recorder: Recorder, saver: RunSaver | None) -> dict[str, Any]:
    """Train, evaluate and save, epoch after epoch; return the last evaluation."""
    trainer = parts.trainer
    test: dict[str, Any] = {}
    start = trainer.cursor
    for epoch in range(start.epoch, config.epochs):
        finished = _train_epoch(config, parts, epoch, start.step if epoch == start.epoch else 0, recorder)
        test = trainer.evaluate(parts.test, parts.metric) if parts.test is not None else {}
        values = {name: mean.value for name, mean in test.items()}
        recorder.record(finished(values))
        _check_finite(trainer, epoch)
        if saver is not None:
            saver.save(trainer, parts.scheduler, values)
        check_wanted(config.keep_best, values)
    return test


def _train_epoch(
    config: Config, parts: RunParts, epoch: int, start_step: int, recorder: Recorder
) -> Callable[[Mapping[str, float]], EpochFinished]:
    trainer = parts.trainer
    began = time.perf_counter()
    total = weight = 0.0
    num_samples = 0
    learning_rate = 0.0
    for batch in parts.train.epoch(epoch, start_step):
        learning_rate = float(trainer.optimizer.param_groups[0]["lr"])
        result = trainer.step(batch)
        if not result.is_skipped:
            total += result.loss * result.weight
            weight += result.weight
        num_samples += batch.num_samples
        recorder.record(
            StepFinished(epoch=epoch, step=batch.cursor.step, global_step=trainer.global_step, loss=result.loss)
        )
    if parts.scheduler is not None and config.scheduler_interval == "epoch":
        parts.scheduler.step()
    seconds = time.perf_counter() - began
    return lambda test: EpochFinished(
        epoch=epoch,
        global_step=trainer.global_step,
        train_loss=total / weight if weight else math.nan,
        test=test,
        samples_per_second=num_samples / seconds,
        learning_rate=learning_rate,
    )


def _check_finite(trainer: Trainer, epoch: int) -> None:
    """Refuse to save a model that a finite loss with a gradient that is not finite has spoilt."""
    for name, parameter in trainer.model.named_parameters():
        if not parameter.isfinite().all():
            raise LossError(
                f"Parameter {name} is not finite after epoch {epoch + 1}, though the losses were: a gradient was not. "
                "Checkpoints of epochs before are kept. Try max_grad_norm, or a smaller learning rate."
            )


def _finish(config: Config, trainer: Trainer) -> str | None:
    if config.finish is None or trainer.world.rank != 0:
        return None
    function = import_object("finish", config.finish)
    trainer.model.eval()
    return str(call_object("finish", function, trainer.model, **config.finish_args))


def _describe_run(config: Config, parts: RunParts, device: torch.device) -> RunStarted:
    model = parts.trainer.model
    return RunStarted(
        world_size=parts.trainer.world.world_size,
        device=str(device),
        num_shards=config.num_shards,
        num_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        num_train_samples=parts.train.num_samples,
        num_test_samples=0 if parts.test is None else parts.test.num_samples,
        first_epoch=parts.trainer.cursor.epoch,
        num_epochs=config.epochs,
        num_steps=len(parts.train),
    )
