"""The run that a config describes, in one worker: train, evaluate, save."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import load_checkpoint, read_manifest
from lockstep.checkpoint.step_files import checkpoint_name
from lockstep.data import Cursor
from lockstep.engine.fingerprint import Fingerprint
from lockstep.engine.raise_on_all import gather_results
from lockstep.engine.trainer import Trainer
from lockstep.errors import CheckpointError, LossError
from lockstep.events import EpochFinished, Recorder, RunStarted, StepFinished
from lockstep.processes.stop_signals import StopRequest
from lockstep.runs.build import RunParts, build_parts
from lockstep.runs.config import Config
from lockstep.runs.environment import gather_facts, write_environment
from lockstep.runs.importing import call_object, import_object
from lockstep.runs.resuming import Resume, restore_run
from lockstep.runs.retention import check_metric_name
from lockstep.runs.saving import RunSaver


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
    is_saved: bool
    """Whether the last checkpoint is on the disk, as rank 0 sees it."""
    finish: str | None
    """What the config's `finish` function returned, on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """Where a run stands that was asked to stop before its end."""

    checkpoint: Path
    """From what it goes on; on the disk."""
    cursor: Cursor
    """The next step."""
    num_steps: int
    """Steps of an epoch."""


def fit(
    config: Config,
    *,
    device: torch.device,
    run_dir: Path,
    recorder: Recorder,
    resume: Resume | None = None,
    code: Path | None = None,
    stop: StopRequest | None = None,
) -> FitResult | StopResult:
    """Train as `config` says, or until somebody asks to stop (collective: every worker calls).

    Args:
        config: The run.
        device: Where this worker trains.
        run_dir: Where checkpoints go; rank 0 writes them, after every epoch, the last before this returns.
        recorder: Told what happens.
        resume: A checkpoint of this run to go on from.
        code: The folder of the user's code, whose commit is noted; None for the current one.
        stop: Asked of on one worker at least, all stop after the same step, when the state is on the disk.

    Raises:
        ConfigError: Something that the config names cannot be found, made or used.
        CheckpointError: A checkpoint cannot be written or read.
        LossError: The loss is not finite.
    """
    stop = StopRequest() if stop is None else stop
    parts = build_parts(config, device)
    trainer = parts.trainer
    if resume is not None:
        restore_run(parts, load_checkpoint(resume.path), config, resume.allowed)
    stop.tell(trainer.request_stop)
    fingerprint = trainer.fingerprint()
    workers = gather_facts(trainer.world, device, fingerprint.device)
    if trainer.world.rank == 0:
        write_environment(run_dir, workers, fingerprint.to_dict(), code or Path())
    recorder.record(_describe_run(config, parts, device))
    if parts.test is None:
        check_metric_name(config.keep_best, {})
    is_over = trainer.cursor.epoch >= config.epochs
    saver = RunSaver(config, run_dir, recorder) if trainer.world.rank == 0 else None
    with saver or nullcontext():
        sums = EpochSums() if resume is None else EpochSums(resume.epoch_loss, resume.epoch_weight)
        test = _train_epochs(TrainingContext(config, parts, recorder, saver, stop), sums)
        if test is None:
            return _confirm_saved(trainer, len(parts.train), saver, run_dir)
    if is_over and parts.test is not None:
        test = trainer.evaluate(parts.test, parts.metric)
    counted = test.get("accuracy", test.get("loss"))
    return FitResult(
        digest=trainer.digest(),
        fingerprint=trainer.fingerprint(),
        test={name: mean.value for name, mean in test.items()},
        num_test_samples=counted.weight if counted is not None else 0,
        num_right=test["accuracy"].total if "accuracy" in test else None,
        is_saved=(run_dir / checkpoint_name(trainer.global_step)).exists(),
        finish=_finish(config, trainer),
    )


@dataclass(slots=True)
class EpochSums:
    """What the mean loss of an epoch is made of; a run that goes on in the middle of one brings the first part."""

    loss: float = 0.0
    """Of the steps so far that were not skipped: loss times weight, summed."""
    weight: float = 0.0
    """Their summed weight."""


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """A run that is trained, in one worker."""

    config: Config
    """The run."""
    parts: RunParts
    """What the config has made."""
    recorder: Recorder
    """Told what happens."""
    saver: RunSaver | None
    """On rank 0."""
    stop: StopRequest
    """Whether this worker was asked to stop."""

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save where the run stands, on rank 0."""
        _check_finite(self.parts.trainer)
        if self.saver is not None:
            self.saver.save(self.parts.trainer, self.parts.scheduler, metrics)


def _train_epochs(training: TrainingContext, sums: EpochSums) -> dict[str, Any] | None:
    """Train, evaluate and save, epoch after epoch; return the last evaluation, or None if the run is to stop.

    A request that comes while an epoch is evaluated and saved is heard when that is done. After the last step there is
    nothing to stop any more.
    """
    config, parts, trainer = training.config, training.parts, training.parts.trainer
    test: dict[str, Any] = {}
    for epoch in range(trainer.cursor.epoch, config.epochs):
        finished = _train_epoch(training, epoch, sums)
        if finished is None:
            return None
        sums = EpochSums()
        test = trainer.evaluate(parts.test, parts.metric) if parts.test is not None else {}
        values = {name: mean.value for name, mean in test.items()}
        training.recorder.record(finished(values))
        training.save(values)
        check_metric_name(config.keep_best, values)
        if epoch + 1 < config.epochs and any(trainer.world.gather_objects(training.stop.is_made)):
            return None
    return test


def _train_epoch(
    training: TrainingContext, epoch: int, sums: EpochSums
) -> Callable[[Mapping[str, float]], EpochFinished] | None:
    """Train an epoch from where the run stands; return how it went, or None if it is saved and stops in the middle."""
    config, parts, trainer = training.config, training.parts, training.parts.trainer
    began = time.perf_counter()
    num_samples = 0
    learning_rate = 0.0
    for batch in parts.train.epoch(epoch, trainer.cursor.step):
        learning_rate = float(trainer.optimizer.param_groups[0]["lr"])
        result = trainer.step(batch)
        if not result.is_skipped:
            sums.loss += result.loss * result.weight
            sums.weight += result.weight
        num_samples += batch.num_samples
        training.recorder.record(
            StepFinished(
                epoch=epoch,
                step=batch.cursor.step,
                global_step=trainer.global_step,
                loss=result.loss,
                weight=0.0 if result.is_skipped else result.weight,
            )
        )
        if trainer.cursor.epoch == epoch:  # at its end it is evaluated first
            is_due = config.save_every is not None and trainer.global_step % config.save_every == 0
            if is_due or result.should_stop:
                training.save({})
            if result.should_stop:
                return None
    if parts.scheduler is not None and config.scheduler_interval == "epoch":
        parts.scheduler.step()
    seconds = time.perf_counter() - began
    return lambda test: EpochFinished(
        epoch=epoch,
        global_step=trainer.global_step,
        train_loss=sums.loss / sums.weight if sums.weight else math.nan,
        test=test,
        samples_per_second=num_samples / seconds,
        learning_rate=learning_rate,
    )


def _confirm_saved(trainer: Trainer, num_steps: int, saver: RunSaver | None, run_dir: Path) -> StopResult:
    """Return where the run stands when the last save is on the disk; nobody leaves before that (collective).

    Raises:
        CheckpointError: It is not there.
        PeerFailedError: Rank 0 says so.
    """
    path = run_dir / checkpoint_name(trainer.global_step)

    def wait_for_save() -> None:
        if saver is None:
            return
        try:
            saver.wait()
            read_manifest(path)  # the save may have failed with a warning
        except CheckpointError as error:
            raise CheckpointError(
                f"The run was asked to stop, and where it stands could not be saved: {error} Checkpoints of before are "
                "whole."
            ) from error

    gather_results(trainer.world, wait_for_save, "saving before the run stops")
    return StopResult(checkpoint=path, cursor=trainer.cursor, num_steps=num_steps)


def _check_finite(trainer: Trainer) -> None:
    """Refuse to save a model that a finite loss with a gradient that is not finite has spoilt."""
    for name, parameter in trainer.model.named_parameters():
        if not parameter.isfinite().all():
            raise LossError(
                f"Parameter {name} is not finite after update {trainer.global_step}, though the losses were: a "
                "gradient was not. Checkpoints of before are kept. Try max_grad_norm, or a smaller learning rate."
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
        first_step=parts.trainer.cursor.step,
    )
