"""The training loop of a run, in one worker: train, evaluate, save."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from lockstep.checkpoint.file import load_checkpoint, read_manifest
from lockstep.comm import World
from lockstep.comm.generations import current_generations
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.batches import gather_results
from lockstep.engine.fingerprint import Fingerprint
from lockstep.engine.present import Continued
from lockstep.engine.state_parts import Scheduler
from lockstep.engine.step_table import StepResult
from lockstep.engine.trainer import Trainer
from lockstep.errors import CheckpointError, LossError, without_code
from lockstep.events import (
    EpochFinished,
    LoadingProcessLost,
    Recorder,
    RunStarted,
    StepFinished,
    WorkerEnded,
    WorkersChanged,
)
from lockstep.processes.stop_signals import StopRequest
from lockstep.recording import own_recorder
from lockstep.runs.build import RunParts, build_parts
from lockstep.runs.config import Config
from lockstep.runs.environment import gather_facts, write_environment
from lockstep.runs.evaluate import RunMeans, check_metric_names, measure_all, update_statistics
from lockstep.runs.importing import call_object, import_object
from lockstep.runs.listing import FitResult, StopResult
from lockstep.runs.saving import Resume, RunSaver, restore_run


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
    """Train as `config` says, until the end or a request to stop (collective: every worker calls).

    Rank 0 writes the checkpoints; the last one is written before this returns. `recorder` gets the same events on every
    worker. If one worker has a request to stop, all stop after the same step.
    """
    stop = StopRequest() if stop is None else stop
    parts = build_parts(config, device)
    trainer = parts.trainer
    sums = EpochSums() if resume is None else EpochSums(resume.epoch_loss, resume.epoch_weight)
    saver = RunSaver(config, run_dir, recorder, parts)
    training = TrainingContext(config, parts, recorder, saver, stop, sums)
    trainer.internals.on_continued = training.follow
    stop.add_listener(trainer.request_stop)
    patch = ""
    if not trainer.join(training, before_leaving=saver.writing.wait):
        check_metric_names(config, parts)
        if resume is not None:
            restore_run(parts, load_checkpoint(resume.path), config, resume.allowed)
        fingerprint = trainer.fingerprint()
        patch = trainer.repeatable(
            lambda world: _write_facts(world, run_dir, fingerprint, device, code or Path(), saves_code=config.save_code)
        )
    recorder.record(_describe_run(config, parts, device, patch))
    if config.audit:
        trainer.internals.audited()
    trainer.internals.moments.start()
    is_over = trainer.cursor.epoch >= config.epochs or trainer.is_ending
    with saver.writing:
        test = _train_epochs(training)
        if test is None:
            return _confirm_saved(trainer, parts.train.num_steps, saver)
        _wait_for_save(trainer, saver)
    if is_over:
        test = measure_all(parts)
    trainer.internals.moments.end()
    shown, counted = test.most_telling()
    return FitResult(
        digest=trainer.digest(),
        fingerprint=str(trainer.fingerprint()),
        test=test.values(),
        shown=shown,
        num_test_samples=int(counted.weight),
        num_right=float(counted.total) if shown.endswith("accuracy") else None,
        is_saved=saver.path.exists(),
        finish=_finish(config, trainer),
        others=test.others,
        end_reason=trainer.end_reason,
    )


@dataclass(slots=True)
class EpochSums:
    """Sums for the mean loss of an epoch; a run resumed in the middle of an epoch starts with those before it."""

    loss: float = 0.0
    """Sum of loss times weight over the steps of the epoch that were not skipped."""
    weight: float = 0.0

    def take_mean(self) -> float:
        """Return the mean loss of an epoch that is over, NaN where nothing had a weight, and begin with the next."""
        mean = self.loss / self.weight if self.weight else math.nan
        self.loss = self.weight = 0.0
        return mean


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What the loop keeps beside the trainer; its state is for a worker that joins."""

    config: Config
    parts: RunParts
    recorder: Recorder
    saver: RunSaver
    stop: StopRequest
    sums: EpochSums

    @property
    def own_scheduler(self) -> Scheduler | None:
        """The scheduler, unless the trainer steps it and has its state."""
        return self.parts.scheduler if self.parts.trainer.scheduler is None else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": self.sums.loss,
            "weight": self.sums.weight,
            "saver": self.saver.state_dict(),
            "scheduler": None if self.own_scheduler is None else self.own_scheduler.state_dict(),
            "others": {name: each.state_dict() for name, each in self.parts.states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.loss, self.sums.weight = state["loss"], state["weight"]
        self.saver.load_state_dict(state["saver"])
        if self.own_scheduler is not None:
            self.own_scheduler.load_state_dict(state["scheduler"])
        for name, each in self.parts.states.items():
            each.load_state_dict(state["others"][name])

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint on rank 0; check the parameters on every rank."""
        _check_finite(self.parts.trainer)
        self.saver.save(metrics)
        self.parts.trainer.internals.moments.note_save(self.saver.path)

    def record_lost_loading_processes(self) -> None:
        """Record which loading processes of any worker were killed since the last call (local)."""
        generations = current_generations()
        if generations is None:
            return
        for lost in generations.take_lost_loading_processes():
            self.recorder.record(
                LoadingProcessLost(
                    process=WorkerEnded(rank=lost.rank, pid=lost.pid, reason=lost.reason),
                    generation=generations.number,
                    epoch=self.parts.trainer.cursor.epoch,
                    step=self.parts.trainer.cursor.step,
                    global_step=self.parts.trainer.global_step,
                )
            )

    def follow(self, continued: Continued, world: World) -> None:
        """Record that the workers are others, and let the next rank 0 do what the last one was to do (local)."""
        self.recorder.record(
            WorkersChanged(
                generation=continued.generation,
                lost=tuple(WorkerEnded(rank=each.rank, pid=each.pid, reason=each.reason) for each in continued.lost),
                joined=tuple((each.rank, each.pid) for each in continued.arrived),
                left=tuple((each.rank, each.pid) for each in continued.left),
                epoch=continued.cursor.epoch,
                step=continued.cursor.step,
                global_step=self.parts.trainer.global_step,
                repeats_step=continued.repeats_step,
                seconds=continued.seconds,
                shards=continued.shards,
                text=str(continued),
            )
        )
        if self.stop.is_made:  # the signal may have come while the engine was made
            self.parts.trainer.request_stop()
        self.saver.take_over(world)


def _train_epochs(training: TrainingContext) -> RunMeans | None:
    """Train, evaluate and save each epoch; return the last evaluation, or None if the run has to stop.

    A request to stop that arrives during evaluation or saving takes effect afterwards. After the last epoch, or where a
    callback ends the run in the same step, it is ignored: a resumed run would know nothing of what the callback wants.
    """
    config, parts, trainer = training.config, training.parts, training.parts.trainer
    test = RunMeans({}, ())
    for epoch in range(trainer.cursor.epoch, config.epochs):
        if trainer.is_ending:
            break
        finished = _train_epoch(training, epoch)
        if finished is None:
            return None
        is_last = epoch + 1 == config.epochs or trainer.is_ending
        if is_last:
            update_statistics(parts)
        test = measure_all(parts)
        if not is_last:
            test = _measure_again_if_ending(parts, test)
        training.recorder.record(finished(test.by_column()))
        training.record_lost_loading_processes()
        training.save(test.values())
        if is_last or trainer.is_ending:
            continue
        is_stopped = trainer.repeatable(lambda world: any(world.gather_objects(training.stop.is_made)))
        if is_stopped and not trainer.internals.moments.will_end():
            return None
    return test


def _train_epoch(training: TrainingContext, epoch: int) -> Callable[[Mapping[str, float]], EpochFinished] | None:
    """Train the rest of an epoch; return a function that makes its event, or None if the run was saved and stops."""
    config, parts, trainer = training.config, training.parts, training.parts.trainer
    began = own_recorder().seconds()
    num_samples = 0
    rate: float | torch.Tensor = 0.0
    is_late = is_asynchronous(next(trainer.model.parameters()).device)
    losses = StepLosses(training.sums, training.recorder, is_late=is_late)
    for batch in parts.train.epoch(epoch, trainer.cursor.step):
        rate = trainer.optimizer.param_groups[0]["lr"]
        in_step = None
        if isinstance(rate, torch.Tensor):  # the step changes it; to read it in each step would wait for a device
            rate = rate.clone()
        else:
            in_step = float(rate)
        result = trainer.step(batch)
        losses.add(result, trainer.global_step, in_step)
        training.record_lost_loading_processes()
        if config.audit:
            for audited in trainer.internals.audited():
                training.recorder.record(audited)
        num_samples += batch.num_samples
        if trainer.is_ending:
            break
        if trainer.cursor.epoch == epoch:  # after the last step the epoch is evaluated first
            is_due = config.save_every is not None and trainer.global_step % config.save_every == 0
            if is_due or result.should_stop:
                losses.record_last()  # a run that is resumed here needs the losses of all steps before
                training.save({})
            if result.should_stop:
                return None
    losses.record_last()
    is_whole = trainer.cursor.epoch != epoch  # else a callback has ended the run
    if parts.scheduler is not None and config.steps_scheduler_per_epoch and is_whole:
        parts.scheduler.step()
    seconds, train_loss, learning_rate = own_recorder().seconds() - began, training.sums.take_mean(), float(rate)
    return lambda measured: EpochFinished(
        epoch=epoch,
        global_step=trainer.global_step,
        train_loss=train_loss,
        measured=measured,
        samples_per_second=num_samples / seconds,
        learning_rate=learning_rate,
    )


@final
class StepLosses:
    """Adds up and records the losses of an epoch's steps.

    To read a loss is to wait for the device, which has nothing to do then until the next step is launched. So where
    the device is asynchronous, a step is recorded when the next one is launched.
    """

    def __init__(self, sums: EpochSums, recorder: Recorder, *, is_late: bool) -> None:
        self._sums = sums
        self._recorder = recorder
        self._is_late = is_late
        self._last: tuple[StepResult, int, float | None] | None = None

    def add(self, result: StepResult, global_step: int, learning_rate: float | None = None) -> None:
        self.record_last()
        self._last = result, global_step, learning_rate
        if not self._is_late:
            self.record_last()

    def record_last(self) -> None:
        if self._last is None:
            return
        (result, global_step, learning_rate), self._last = self._last, None
        weight = 0.0 if result.is_skipped else result.weight
        if weight:
            self._sums.loss += result.loss * weight
            self._sums.weight += weight
        self._recorder.record(
            StepFinished(
                epoch=result.cursor.epoch,
                step=result.cursor.step,
                global_step=global_step,
                loss=result.loss,
                weight=weight,
                learning_rate=learning_rate,
                grad_norm=result.grad_norm,
            )
        )


def _measure_again_if_ending(parts: RunParts, test: RunMeans) -> RunMeans:
    """Return an evaluation, or if it ended the run one with BatchNorm's statistics for mean weights (collective)."""
    if not parts.trainer.is_ending or not update_statistics(parts):
        return test
    with parts.trainer.internals.moments.no_evaluation():
        return measure_all(parts)


def _describe_run(config: Config, parts: RunParts, device: torch.device, patch: str) -> RunStarted:
    model = parts.trainer.model
    return RunStarted(
        world_size=parts.trainer.world.world_size,
        device=str(device),
        num_shards=config.total_shards,
        num_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        num_train_samples=parts.train.num_samples,
        num_test_samples=0 if parts.test is None else parts.test.num_samples,
        first_epoch=parts.trainer.cursor.epoch,
        num_epochs=config.epochs,
        num_steps=parts.train.num_steps,
        first_step=parts.trainer.cursor.step,
        fingerprint=str(parts.trainer.fingerprint()),
        patch=patch,
    )


def _write_facts(
    world: World, run_dir: Path, fingerprint: Fingerprint, device: torch.device, code: Path, *, saves_code: bool
) -> str:
    """Record where the workers run (collective); rank 0 writes, the others wait; return its patch of the code."""
    workers = gather_facts(world, device, fingerprint.device)

    def write() -> str:
        if world.rank != 0:
            return ""
        name = write_environment(run_dir, workers, fingerprint.to_dict(), code, saves_code=saves_code)
        return "" if name is None else str(run_dir / name)

    return gather_results(world, write, "recording the environment of the run")[0]


def _wait_for_save(trainer: Trainer, saver: RunSaver) -> None:
    """Wait on every worker until rank 0 has written the last checkpoint: if it is lost, another writes it."""
    if trainer.internals.can_continue:
        trainer.repeatable(lambda world: gather_results(world, saver.writing.wait, "writing the last checkpoint"))


def _confirm_saved(trainer: Trainer, num_steps: int | None, saver: RunSaver) -> StopResult:
    """Wait on every rank until the last save is on the disk, and return the state of the run (collective)."""
    path = saver.path

    def wait_for_save() -> None:
        if trainer.world.rank != 0:
            return
        try:
            saver.writing.wait()
            read_manifest(path)  # a failed save may only have warned
        except CheckpointError as error:
            raise CheckpointError(
                "The run was asked to stop, but its state could not be saved: "
                f"{without_code(error)} Earlier checkpoints are intact. (LS703)"
            ) from error

    trainer.repeatable(lambda world: gather_results(world, wait_for_save, "saving before the run stops"))
    cursor = trainer.cursor
    return StopResult(checkpoint=path, epoch=cursor.epoch, step=cursor.step, num_steps=num_steps)


def _check_finite(trainer: Trainer) -> None:
    for name, parameter in trainer.model.named_parameters():
        if not parameter.isfinite().all():
            raise LossError(
                f"Parameter {name} is not finite after update {trainer.global_step}, although the losses were: a "
                "gradient was not. Earlier checkpoints are kept. Try max_grad_norm, or a smaller learning rate. (LS516)"
            )


def _finish(config: Config, trainer: Trainer) -> str | None:
    """Call the config's own last function on rank 0; if it is lost meanwhile, on the next rank 0."""
    path = config.finish
    if path is None:
        return None

    def call() -> str | None:
        if trainer.world.rank != 0:
            return None
        function = import_object("finish", path)
        trainer.model.eval()
        return str(call_object("finish", function, trainer.model, **config.finish_args))

    if not trainer.internals.can_continue:
        return call()
    return trainer.repeatable(lambda world: gather_results(world, call, "the config's finish function"))[0]
