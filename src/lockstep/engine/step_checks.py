"""Parts of a step that check something, by themselves in `begin`, and by what all workers have sent in `check`."""

import zlib
from collections.abc import Sequence
from typing import final

from lockstep.comm import calls_for
from lockstep.data import OTHER_DATA, Cursor
from lockstep.engine.arguments import ModelChangeCheck, SettingsChangeCheck
from lockstep.engine.balance import Balancer
from lockstep.engine.batches import check_cut, check_sync_batchnorm
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import FAILURE, Column, CurrentStep, Failure, Rows, StepPart
from lockstep.engine.written_parameters import WrittenParameterCheck
from lockstep.errors import LossError, ReductionError, UnusableStateError, describe_exception


@final
class WrittenParameters(StepPart):
    """Puts back parameters that shards have written: they would depend on who runs which shard."""

    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._world = runs.state, runs.world
        self._has_several = runs.state.num_shards > 1
        self._parameters = WrittenParameterCheck(
            runs.state.model, reads_contents=self._has_several, others=runs.state.networks.parameters
        )
        self._first = Column(int, self._find, is_of_failed=True)
        self.columns = (self._first,)

    def begin(self, step: CurrentStep) -> None:
        step.has_recorded_parameters = True
        self._parameters.begin()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        rank, number = next(((rank, each) for rank, each in enumerate(rows[self._first]) if each), (0, 0))
        if not number:
            return
        lost = self._put_back()
        if any(rows[FAILURE]):
            return  # that error is raised
        left = "It was put back on every rank. No parameter was changed."
        if lost:
            left = (
                f"Every rank has written {', '.join(lost[:3])}, which cannot be put back: load a checkpoint on every "
                "rank, trainer.load(path), or start again."
            )
        raise LossError(
            f"Parameter {self._parameters.names[number - 1]} was written on rank {rank} while the shards of "
            f"{step.place} ran, by a forward, the loss function or a hook. Each worker runs other "
            "shards, so the weights would depend on the number of workers. Keep an average of the weights in "
            f"buffers, or update it between two steps; do without max_norm in an embedding. {left} (LS518)"
        )

    def undo(self, step: CurrentStep) -> None:
        """Note parameters that the only shard of a run has written, which is no error if the step succeeds (local)."""
        if step.rows is not None and not self._has_several and self._find_written():
            self._state.mark_unusable("A forward or the loss function had written parameters.")

    def _find(self, step: CurrentStep) -> int:
        if step.failure:
            return self._find_written() if step.has_recorded_parameters else 0
        return self._parameters.find_written() if self._has_several else 0

    def _find_written(self) -> int:
        try:
            return self._parameters.find_written()
        except Exception:  # noqa: BLE001 - a device that has failed cannot be read, and the others wait for this worker
            self._state.mark_unusable("Whether a forward had written parameters could not be read.")
            return 0

    def _put_back(self) -> list[str]:
        """Put back what was written (collective); return whose values are lost."""
        try:
            lost = self._parameters.put_back(self._world)
        except BaseException:
            self._state.mark_unusable("A forward or the loss function had written parameters.")
            raise
        if lost:
            self._state.mark_unusable(f"A forward or the loss function had written to {', '.join(lost[:3])}.")
        return lost


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
            found = self._world.gather_objects(self._state.failed_step)
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
        """Raise what a worker has raised in this step (collective).

        Nothing is raised where this worker's reduction has failed and no worker has an error of its own.
        """
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
    """Checks that the batch is the next one of the run, on all workers."""

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
    """Checks that the model, its scheduler and the process are what the trainer was made with."""

    def __init__(self, runs: ShardRuns) -> None:
        self._state = runs.state
        self._model = ModelChangeCheck(runs.state.model, runs.state.optimizer, runs.trained)
        self._settings = SettingsChangeCheck()

    def begin(self, _step: CurrentStep) -> None:
        self._model.check()
        self._settings.check()
        self._state.scheduler_check.check()


@final
class ShardBalance(StepPart):
    """Moves shards to workers that are faster, where the trainer has `balance="speed"`."""

    def __init__(self, runs: ShardRuns) -> None:
        self._runs = runs
        self._balancer = Balancer()
        self._seconds = Column(float, self._read_seconds)
        self._epoch = Column(int, lambda step: step.batch.assignment.last_requested.epoch)
        self._step = Column(int, lambda step: step.batch.assignment.last_requested.step)
        self.columns = () if runs.stopwatch is None else (self._seconds, self._epoch, self._step)

    def check(self, step: CurrentStep, rows: Rows) -> None:
        if self.columns:
            last_requested = max(map(Cursor, rows[self._epoch], rows[self._step]))
            self._balancer.note(step.batch, rows[self._seconds], last_requested)

    def _read_seconds(self, _step: CurrentStep) -> float:
        return 0.0 if self._runs.stopwatch is None else self._runs.stopwatch.seconds_per_shard()


@final
class StepRequests(StepPart):
    """Lets all workers stop, end, or be others, after the same step.

    `planned` is the generation of workers that this one knows to be planned; 0 for none.
    """

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
