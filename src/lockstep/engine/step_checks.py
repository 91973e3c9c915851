"""Parts of a step that check something, by themselves in `begin`, and by what all workers have sent in `check`."""

import warnings
import zlib
from collections.abc import Sequence
from typing import final

import torch

from lockstep.comm import calls_for
from lockstep.data import OTHER_DATA
from lockstep.engine.arguments import check_optimizer
from lockstep.engine.batches import check_cut, check_sync_batchnorm
from lockstep.engine.schedules import end_of
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import FAILURE, Column, CurrentStep, Failure, Rows, StepPart
from lockstep.errors import ReductionError, UnusableStateError, describe_exception
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import TrainedModel
from lockstep.settings import read_settings
from lockstep.torch_private.portable import check_portable


@final
class StepProgress(StepPart):
    """Checks that all workers have taken the same steps and can finish this one, and counts it."""

    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._world = runs.state, runs.world
        self._num_steps = Column(int, lambda _: runs.state.progress, is_of_failed=True)
        self.columns = FAILURE, self._num_steps

    def begin(self, _step: CurrentStep) -> None:
        self._state.check_usable()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        failures, counts = rows[FAILURE], rows[self._num_steps]
        if len(set(counts)) > 1 or Failure.UNUSABLE in failures:
            self._raise_other_steps(counts)
        if any(failures):
            self._raise_failure(step, failures)

    def commit(self, step: CurrentStep) -> None:
        self._state.advance(step.batch, is_last=step.is_last)

    def _raise_other_steps(self, counts: Sequence[int]) -> None:
        """Raise where the workers have not taken the same steps, with the same text on all (collective).

        An update that fails on one worker fails when the others may have made theirs, so it is found in the next step.
        """
        with calls_for("comparing the steps that the workers have taken"):
            found = self._world.gather_objects(self._state.failed_here or self._state.unusable_because)
        texts = [f"On rank {rank}, {text}" for rank, text in enumerate(found) if text]
        if not texts:
            odd = next((rank for rank, count in enumerate(counts) if count != counts[0]), 0)
            raise UnusableStateError(
                f"Rank {odd} has taken {counts[odd]} steps of this run and rank 0 {counts[0]}. Load the same "
                "checkpoint on every rank: trainer.load(path). This step has changed nothing. (LS524)"
            )
        done = [str(rank) for rank, count in enumerate(counts) if count == max(counts) and count > min(counts)]
        finished = f" It was finished on rank {', '.join(done)}." if done else ""
        raise UnusableStateError(
            f"{' '.join(texts)}{finished} No further step can be taken. Load a checkpoint on every rank: "
            "trainer.load(path). (LS524)"
        )

    def _raise_failure(self, step: CurrentStep, failures: Sequence[Failure]) -> None:
        """Raise a worker's error (collective); none where the reduction failed here and no worker has its own."""
        with calls_for("sending an error to the other ranks"):
            found = self._world.gather_objects(None if step.error is None else describe_exception(step.error))
        cause = next(((rank, text) for rank, text in enumerate(found) if text is not None), None)
        if cause is not None:
            rank, text = cause
            raise ReductionError(
                f"Rank {rank} raised an error in this step. No parameter was changed on any rank. The error: {text} "
                "(LS523)"
            )
        if not failures[self._world.rank]:
            ranks = [str(rank) for rank, failure in enumerate(failures) if failure]
            raise ReductionError(
                f"The gradients of this step could not be reduced on rank {', '.join(ranks)}, whose error says why. "
                "No parameter was changed on any rank. (LS523)"
            )


@final
class SameBatch(StepPart):
    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._world = runs.state, runs.world
        self._epoch = Column(int, lambda step: step.batch.cursor.epoch)
        self._step = Column(int, lambda step: step.batch.cursor.step)
        self._source = Column(int, self._number_source)
        self.columns = self._epoch, self._step, self._source

    def begin(self, step: CurrentStep) -> None:
        check_cut(step.batch, self._state.num_shards, self._world)
        check_sync_batchnorm(step.batch, self._state.model)
        self._state.data.check(step.batch, self._state.cursor)

    def check(self, _step: CurrentStep, rows: Rows) -> None:
        places = list(zip(rows[self._epoch], rows[self._step], rows[self._source], strict=True))
        odd = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if odd is None:
            return
        (epoch, number, _), (other_epoch, other_number, _) = places[0], places[odd]
        if (epoch, number) == (other_epoch, other_number):
            what = (
                f"of another loader or of other data (rank 0 is at epoch {epoch}, step {number}, and so is rank {odd})"
            )
            remedy = f"Make the loader with the same arguments on every rank. If it is: {OTHER_DATA}"
        else:
            remedy = "Make the loader with the same arguments on every rank, and skip no batch on one of them alone."
            what = f"epoch {other_epoch}, step {other_number}, and rank 0's epoch {epoch}, step {number}"
        raise ValueError(
            f"The workers train on different batches: rank {odd}'s is {what}. {remedy} No parameter was changed. "
            "(LS512)"
        )

    def _number_source(self, step: CurrentStep) -> int:
        if self._world.world_size == 1:
            return 0
        return zlib.crc32(f"{step.batch.source} {step.batch.identity}".encode())


@final
class SameSettings(StepPart):
    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._trained = runs.state, runs.trained
        self._held = self._list_held()
        self._settings = _read_settings()
        self._has_warned_of_scheduler = False

    def begin(self, step: CurrentStep) -> None:
        self._check_model()
        self._check_settings()
        self._check_scheduler(step)

    def _check_model(self) -> None:
        held = self._list_held()
        if held != self._held:
            check_optimizer(self._state.optimizer, self._state.model)
            self._held = held
        if not self._trained.has_changed():
            return
        current = TrainedModel(self._state.model)
        before = {each.spec.name: str(each.spec) for each in self._trained.trained}
        now = {each.spec.name: str(each.spec) for each in current.trained}
        changes = [f"{name} is no longer trained" for name in before if name not in now]
        changes += [f"{name} is new or newly trained" for name in now if name not in before]
        changes += [f"{before[name]} is {now[name]} now" for name in now if before.get(name, now[name]) != now[name]]
        listed = "; ".join(changes[:3]) or "a parameter was replaced by another of the same name"
        more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""  # noqa: PLR2004 - as many as are listed
        raise ValueError(
            f"The model was changed between steps: {listed}{more}. Make a new trainer of the changed model, with an "
            "optimizer of its parameters, on every worker alike. (LS513)"
        )

    def _list_held(self) -> list[int]:
        return [id(parameter) for group in self._state.optimizer.param_groups for parameter in group["params"]]

    def _check_settings(self) -> None:
        before, self._settings = self._settings, _read_settings()
        if before != self._settings:
            if read_settings().is_portable():
                check_portable(self._state.device)
            changes = [
                f"{name} from {value} to {self._settings[name]}"
                for name, value in before.items()
                if value != self._settings[name]
            ]
            warnings.warn(
                f"Since the trainer was made, a setting has changed: {' and '.join(changes)}. From this step on the "
                "weights have other last bits. Set it before the trainer is made. (LS513)",
                stacklevel=stacklevel_of_user(),
            )

    def _check_scheduler(self, step: CurrentStep) -> None:
        """Warn, once, of one that counts epochs, or that the user steps. [Note: steps outside of the trainer]."""
        before, problem = self._state.num_scheduled, ""
        self._state.note_scheduler()
        if self._state.num_scheduled != before:
            problem = (
                "The scheduler was stepped outside of Trainer.step: the learning rate changes faster than it says. "
                "Leave scheduler.step() out of the loop."
            )
        elif step.batch.cursor.epoch == 0 and 0 < (self._state.num_scheduled or 0) == end_of(self._state.scheduler):
            problem = (
                f"The schedule of the learning rate is over after {self._state.num_scheduled} steps, in the first "
                "epoch. Make it for the steps of the whole run, epochs times len(loader)."
            )
        if problem and not self._has_warned_of_scheduler:
            self._has_warned_of_scheduler = True
            warnings.warn(
                f"{problem} Trainer.step steps it once per step: leave one that counts epochs out of the trainer, and "
                "step it after each epoch; in a config scheduler_interval: epoch. (LS517)",
                stacklevel=stacklevel_of_user(),
            )


def _read_settings() -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "deterministic operators": torch.are_deterministic_algorithms_enabled(),
    }


@final
class StepRequests(StepPart):
    """Lets all stop, end, or be others after one step; `planned` is the generation this one knows of, or 0."""

    def __init__(self, runs: ShardRuns) -> None:
        self._state = state = runs.state
        self.stop_requested = False
        self.planned = 0
        self._stop = Column(bool, lambda _: self.stop_requested)
        self._planned = Column(int, lambda _: self.planned)
        self._end = Column(bool, lambda _: bool(state.end_reason or state.end_reason_after_step))
        self.columns = self._stop, self._planned, self._end

    def commit(self, step: CurrentStep) -> None:
        if step.rows is not None and any(step.rows[self._end]):
            self._state.note_end()

    def planned_on_any(self, rows: Rows) -> int:
        return max(rows[self._planned])

    def should_stop(self, rows: Rows) -> bool:
        return self._state.is_ending or any(rows[self._stop])
