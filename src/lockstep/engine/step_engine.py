"""The engine of a step: made for one set of workers, a *generation*, and closed with it.

    IDLE
    PREPARE   record generators and buffers -> check the batch, the model, the options
    COMPUTE   for each shard of this worker, largest subtree first:
                  seed from (seed, epoch, step, shard) -> forward -> loss * weight -> backward
              gradients are added in tree order; the last shard's backward starts to send buckets
    REDUCE    the rest of the buckets, shard 0's buffers beside the last one; wait; fill in the step table
    AGREE     exchange the table -> check what all workers say -> divide, look for what is not finite
    COMMIT    seed from (seed, epoch, step) -> clip -> update -> scheduler -> buffers -> cursor + 1
    IDLE

Before COMMIT nothing that lasts is written, but for what is recorded and put back: generators and buffers. A worker
that fails before AGREE takes part in the reduction with nothing, and in the exchange of tables with its failure, so
that the step fails on all workers ([Note: the commit point] in `lockstep.engine.step_table`).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from lockstep.comm import World, broadcast_tensors
from lockstep.data import Cursor, ShardedBatch
from lockstep.engine.arguments import Terms, check_same_terms
from lockstep.engine.balance import Balancer, Stopwatch
from lockstep.engine.batches import check_cut, check_sync_batchnorm, place_of
from lockstep.engine.buffers import ShardZeroBuffers, without_repeats
from lockstep.engine.checks import ModelChangeCheck, SettingsChangeCheck, check_fingerprints
from lockstep.engine.comparison import WorkerComparison
from lockstep.engine.external_steps import guard_steps
from lockstep.engine.gradients import explain_nonfinite, require_gradients
from lockstep.engine.random_states import RandomStates
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import Loss, ShardRuns
from lockstep.engine.side_effects import WrittenParameterCheck
from lockstep.engine.step_checks import (
    NestedBackwardCheck,
    check_places,
    check_progress,
    check_written,
    find_bad_loss,
    raise_failure,
)
from lockstep.engine.step_phase import ALLOWED_TRANSITIONS, StepPhase
from lockstep.engine.step_table import Failure, StepSums, StepTable, WorkerNumbers, WorkerStatus
from lockstep.engine.update import Update
from lockstep.errors import GroupError, LossError, ReductionError, UnusableStateError
from lockstep.reduce import BucketLimits, ShardReducer, TrainedModel, check_same_model
from lockstep.shards import ShardTask, derive_seed
from lockstep.torch_private import foreach_div_


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a run takes its steps."""

    loss: Loss
    """The loss function."""
    max_grad_norm: float | None
    """Where the gradient's norm is clipped."""
    nonfinite: Literal["stop", "skip"]
    """What to do with a step whose loss or gradient is not finite."""
    balance: Literal["even", "speed"]
    """Whether shards move from slow workers to fast ones."""
    bucket_limits: BucketLimits
    """Sizes of the gradient buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; the same on every worker."""

    loss: float
    """Weighted mean loss of the global batch, in the order of the tree: the same bits on any number of workers."""
    weight: float
    """Summed weight of the global batch: samples, unless the loss says otherwise."""
    cursor: Cursor
    """The step that was taken."""
    is_skipped: bool = False
    """Whether the loss was not finite and nothing was changed but the cursor and the learning rate."""
    should_stop: bool = False
    """Whether some worker was asked to stop (`Trainer.request_stop`); the same on all workers after the same step. Not
    after the last step of an epoch, unless it is the only one: what a loop does between two epochs (step a scheduler,
    evaluate) belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What all workers have decided to commit."""

    sums: StepSums
    """The step table."""
    norm: Tensor | None
    """The gradient's norm, where it is clipped."""
    is_skipped: bool
    """Whether parameters, buffers and optimizer stay as they are."""


@final
class StepEngine:
    """Takes the steps of a run with one set of workers.

    Constructing is collective. Rank 0's parameters and buffers become those of all workers.

    Args:
        state: The state of the run, kept when this engine is closed; written in the commit phase alone.
        options: How steps are taken.
        world: The workers.
        terms: What each worker's trainer was given, in rank order; compared.

    Attributes:
        world: The workers.
        phase: What the engine is doing.
        stopwatch: Measures how long a shard takes.
        wants_stop: Whether this worker was asked to stop.

    Raises:
        ParameterMismatchError: Workers have different models.
        ValueError: Their trainers were given different arguments.
    """

    def __init__(self, state: RunState, options: StepOptions, world: World, terms: Sequence[Terms]) -> None:
        model, optimizer = state.model, state.optimizer
        trained = TrainedModel(model)
        check_same_model(trained, world)
        check_same_terms(terms)
        check_fingerprints(state.fingerprint(), world)
        if world.group is not None:
            broadcast_tensors(list(map(without_repeats, trained.tensors())), world.group)
        self.world = world
        self.phase = StepPhase.IDLE
        self.stopwatch = Stopwatch(state.device)
        self.wants_stop = False
        self._state = state
        self._skips_nonfinite = options.nonfinite == "skip"
        self._max_grad_norm = options.max_grad_norm
        self._balancer = Balancer() if options.balance == "speed" and world.world_size > 1 else None
        self._random = RandomStates()
        self._buffers = ShardZeroBuffers(model, world, state.device)
        self._gradients = ShardReducer(trained, world, state.num_shards, options.bucket_limits)
        self._gradients.on_last_gradient(self.stopwatch.lap_if_only)
        self._gradients.send_besides(self._buffers.start_sending)
        self._runs = ShardRuns(state, options.loss, self._gradients, self._buffers)
        self._written_parameters = WrittenParameterCheck(model)
        self._model_changes = ModelChangeCheck(model, optimizer, trained)
        self._settings = SettingsChangeCheck()
        self._nested_backwards = NestedBackwardCheck(
            lambda adds_once: self._gradients.note_single_additions(adds_once=adds_once)
        )
        self._comparison = WorkerComparison(model, optimizer, world)
        self._guard = guard_steps(optimizer, self)
        self._update = Update(state, options.max_grad_norm, self._guard)

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective); `Trainer.step` says what it raises."""
        self._enter(StepPhase.PREPARE)
        table = StepTable(self.world, self._state.num_shards, self._state.device)
        try:
            self._random.save()
            self._buffers.begin()
            tasks = self._prepare(batch)
            self._run_shards(batch, tasks, table)
            decision = self._agree(batch, table)
            self._enter(StepPhase.COMMIT)
            self._commit(batch, decision)
        except BaseException as error:
            self._undo(error, batch, table)
            raise
        self._enter(StepPhase.IDLE)
        is_end = self._state.cursor.step == 0 and batch.num_steps > 1
        return StepResult(
            loss=decision.sums.mean_loss,
            weight=decision.sums.weight,
            cursor=batch.cursor,
            is_skipped=decision.is_skipped,
            should_stop=any(status.wants_stop for status in decision.sums.statuses) and not is_end,
        )

    def close(self) -> None:
        """Release hooks, threads and buckets, and the gradients that lie in them (local); not during a step."""
        if self.phase is StepPhase.CLOSED:
            return
        self._enter(StepPhase.CLOSED)
        self._guard.remove(self)
        self._gradients.close()
        self._state.model.zero_grad(set_to_none=True)

    def _enter(self, phase: StepPhase) -> None:
        """Enter another phase; every transition is made here."""
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            if self.phase is StepPhase.CLOSED:
                raise ValueError("The trainer was closed: no step can be taken any more. Make a new trainer.")
            raise ValueError(f"The trainer is in the {self.phase.name} phase of a step: let the step end first.")
        self.phase = phase

    # -- The phases ----------------------------------------------------------------------------------------------------

    def _prepare(self, batch: ShardedBatch) -> Sequence[ShardTask]:
        """Check what there is to check before anything is computed; return what this worker is to run (local)."""
        state = self._state
        state.check_usable()
        check_cut(batch, state.num_shards, self.world)
        check_sync_batchnorm(batch, state.model)
        state.data.check(batch, state.cursor)
        self._model_changes.check()
        self._settings.check()
        state.scheduler_check.check()
        state.model.zero_grad(set_to_none=True)  # all of it, also what the optimizer does not train
        tasks = self._gradients.begin(batch.ranges)
        self._buffers.expect(len(tasks))
        if state.num_shards > 1:
            self._written_parameters.begin()
        return tasks

    def _run_shards(self, batch: ShardedBatch, tasks: Sequence[ShardTask], table: StepTable) -> None:
        """Run this worker's shards, and reduce (collective)."""
        self._enter(StepPhase.COMPUTE)
        watches_attributes = self._nested_backwards.is_first and self.world.rank == 0
        self.stopwatch.start()
        self._runs.run(batch, tasks, table, self.stopwatch, watches_attributes=watches_attributes)
        self._enter(StepPhase.REDUCE)
        self._runs.end_last(tasks)

    def _agree(self, batch: ShardedBatch, table: StepTable) -> _Decision:
        """Exchange the step table, and decide what to commit, alike on all workers (collective)."""
        with batch.assignment.held():
            table.fill_in(batch, self._take_status(batch), self._take_numbers())
            self._enter(StepPhase.AGREE)
            sums = table.exchange()
            check_progress(sums, self.world, self._state.failed_step)
            raise_failure(sums, self.world, None)
            lost = self._put_back_parameters(sums)
            check_places(sums)
            if self._balancer is not None:
                seconds, asked = zip(*((each.seconds, each.asked) for each in sums.statuses), strict=True)
                self._balancer.note(batch, seconds, max(asked))
        if sums.statuses[0].has_new_layout:
            self._buffers.exchange_new_layout()
        check_written(sums, self._written_parameters.names, lost, batch)
        self._nested_backwards.check(sums, batch)
        self._comparison.check_options(sums.options, place_of(batch.cursor))
        self._comparison.check_values(sums.values, place_of(batch.cursor))
        return self._decide(batch, sums)

    def _put_back_parameters(self, sums: StepSums) -> list[str]:
        """Put back parameters that shards have written (collective where some have); return which cannot be."""
        if not any(status.written for status in sums.statuses):
            return []
        lost = self._written_parameters.put_back(self.world)
        if lost:
            self._state.mark_unusable(f"A forward or the loss function had written to {', '.join(lost[:3])}.")
        return lost

    def _decide(self, batch: ShardedBatch, sums: StepSums) -> _Decision:
        norm: Tensor | None = None
        problem = find_bad_loss(sums, batch)
        if not problem:
            gradients = require_gradients(self._state.trained_parameters(), place_of(batch.cursor))
            if sums.weight != batch.num_samples:
                foreach_div_(gradients, sums.weight / batch.num_samples)
            if self._state.scaler is None and self._max_grad_norm is not None:
                norm = nn.utils.get_total_norm(gradients)
            if sums.may_be_nonfinite or (norm is not None and not math.isfinite(norm)):
                problem = explain_nonfinite(self._state, norm, place_of(batch.cursor))
        if problem and not self._skips_nonfinite:
            raise LossError(f"{problem} No parameter was changed.")
        if problem:
            warnings.warn(f"{problem} The step is skipped on every worker.", stacklevel=5)
        return _Decision(sums=sums, norm=norm, is_skipped=bool(problem))

    def _commit(self, batch: ShardedBatch, decision: _Decision) -> None:
        """Write the result of the step (local). The user's code, which may fail, comes first."""
        state = self._state
        self._random.seed(derive_seed("update", state.seed, batch.cursor.epoch, batch.cursor.step))
        self._update.apply(decision.norm, is_skipped=decision.is_skipped)
        try:
            if decision.is_skipped:
                self._buffers.undo()
            else:
                self._buffers.commit()
            state.advance(batch)
            self._random.discard()
            self._comparison.note_equal_values()
        except BaseException:  # a Ctrl-C: these calls raise nothing else
            state.mark_unusable("The optimizer had updated the parameters.")
            raise

    # -- A step that fails ---------------------------------------------------------------------------------------------

    def _undo(self, error: BaseException, batch: ShardedBatch, table: StepTable) -> None:
        """Put back what was recorded, and let the step fail on all workers (collective where others wait).

        Raises:
            BaseException: Something could not be put back.
            ReductionError: What another worker has raised, where `error` is only a consequence of it.
            UnusableStateError: An earlier step has failed on some workers alone.
        """
        failed_in = self.phase
        self._enter(StepPhase.IDLE)
        try:
            self._buffers.undo()
            self._random.restore()
        except BaseException:
            self._state.mark_unusable("Buffers or random generators could not be put back.")
            raise
        finally:
            # An error in the last two phases may be one of this worker alone, and others have finished the step.
            self._comparison.compare_values_next_step()
            if isinstance(error, UnusableStateError) and failed_in is StepPhase.AGREE:
                pass  # of an earlier step, which is noted already
            elif failed_in in {StepPhase.AGREE, StepPhase.COMMIT}:
                self._state.note_failed_step(place_of(batch.cursor), error)
            elif isinstance(error, Exception) and not isinstance(error, GroupError):
                # After a GroupError every worker has one, or has exited.
                has_reduced = failed_in is not StepPhase.PREPARE and self._gradients.has_reduced
                self._report_failure(error, table, getattr(batch, "ranges", ()), has_reduced=has_reduced)

    def _report_failure(
        self, error: Exception, table: StepTable, ranges: Sequence[range], *, has_reduced: bool
    ) -> None:
        """Make the calls in which the other workers wait for this one, and send them the error (collective)."""
        failure = Failure.OWN
        if isinstance(error, UnusableStateError):
            failure = Failure.UNUSABLE
        elif has_reduced and isinstance(error, ReductionError):
            failure = Failure.REDUCTION
        is_consequence = failure is Failure.REDUCTION
        try:
            if not has_reduced:
                self._gradients.fail(ranges)
            table.fill_in_failure(failure, self._state.global_step)
            sums = table.exchange()
            check_progress(sums, self.world, self._state.failed_step)
            raise_failure(sums, self.world, None if is_consequence else error)
        except UnusableStateError as found:
            raise found from error
        except ReductionError as found:
            if is_consequence:
                raise found from error
        except Exception:  # noqa: BLE001 - an error of these calls is not the cause
            return

    # -- The row of this worker ----------------------------------------------------------------------------------------

    def _take_status(self, batch: ShardedBatch) -> WorkerStatus:
        return WorkerStatus(
            num_steps=self._state.global_step,
            seconds=0.0 if self._balancer is None else self.stopwatch.seconds_per_shard(),  # may wait for a device
            asked=batch.assignment.asked,
            ran_inner=self._gradients.ran_inner,
            written=self._written_parameters.find_written() if self._state.num_shards > 1 else 0,
            has_new_layout=self.world.rank == 0 and self._buffers.has_new_layout(),
            wants_stop=self.wants_stop,
        )

    def _take_numbers(self) -> WorkerNumbers:
        gradients: Tensor | int = 0
        if self._state.scaler is None and self._max_grad_norm is None:  # else the scaler or the norm shows it
            gradients = self._gradients.sum_for_finite_check(self._state.device)
        return WorkerNumbers(
            options=self._comparison.options_number(), values=self._comparison.values_number(), gradients=gradients
        )
