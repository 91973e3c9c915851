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

Where workers continue without one that is lost, each exchange after the table calls `ask_others` if it fails: the last
one may have failed here alone, and the worker then has all to finish the step but what that exchange returns.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm import World, broadcast_tensors, raise_if_broken
from lockstep.data import ShardedBatch
from lockstep.devices.transfer import is_asynchronous
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.engine.arguments import (
    ModelChangeCheck,
    SettingsChangeCheck,
    TrainerArguments,
    check_fingerprints,
    check_same_arguments,
)
from lockstep.engine.balance import Balancer
from lockstep.engine.batches import check_cut, check_sync_batchnorm, gather_results, name_step
from lockstep.engine.buffer_snapshot import without_repeats
from lockstep.engine.buffers import ShardZeroBuffers
from lockstep.engine.comparison import WorkerComparison, number_shards
from lockstep.engine.decision import Decision, StepJudge
from lockstep.engine.device_row import DeviceRow
from lockstep.engine.external_steps import StepGuards
from lockstep.engine.failed_step import FailedStep, release_memory
from lockstep.engine.optimizers import UpdateSpec, separate_optimizers
from lockstep.engine.own_generators import OwnGenerators
from lockstep.engine.parameter_hooks import ParameterHooks
from lockstep.engine.random_states import RandomStates
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_checks import (
    NestedBackwardCheck,
    check_places,
    check_progress,
    check_written,
    raise_failure,
)
from lockstep.engine.step_phase import ALLOWED_TRANSITIONS, StepPhase
from lockstep.engine.step_result import StepOutcome, StepResult, merge_updates, with_values
from lockstep.engine.step_table import StepAgreement, StepSums, StepTable, WorkerNumbers, WorkerStatus
from lockstep.engine.step_values import StepValues
from lockstep.engine.stopwatch import DeviceShards, RecordedShards, Stopwatch
from lockstep.engine.update import Update
from lockstep.engine.written_parameters import WrittenParameterCheck
from lockstep.errors import GroupError, UnusableStateError
from lockstep.recording import EventKind, own_recorder
from lockstep.reduce import ShardReducer, TrainedModel, check_same_model
from lockstep.reduce.model import Description
from lockstep.shards import ShardTask, derive_seed


@final
class StepEngine:
    """Takes the steps of a run with one set of workers.

    Constructing is collective. Rank 0's parameters and buffers become those of all workers. With `descriptions` None
    (workers continue without others) it is local: nothing is compared or broadcast, and the next step compares.

    `planned` is the generation of workers that this one knows to be planned; 0 for none. `ask_others` returns what was
    exchanged where that has failed here, if another worker has all of it; else it raises the error.
    """

    def __init__(
        self, state: RunState, arguments: TrainerArguments, world: World, descriptions: Sequence[Description] | None
    ) -> None:
        record_this_worker(world.rank, world.world_size)
        model, optimizer = state.model, state.optimizer
        state.networks.find()
        self._trained = trained = TrainedModel(model)
        if descriptions is not None:
            check_same_model(trained, world)
            check_same_arguments(descriptions)
            check_same_arguments(gather_results(world, state.parts.describe, "constructing a Trainer"))
            check_fingerprints(state.fingerprint(), world)
            if world.group is not None:
                broadcast_tensors(((name, without_repeats(each)) for name, each in trained.tensors()), world.group)
        self.world = world
        self.phase = StepPhase.IDLE
        self._recorder = own_recorder()
        self.stop_requested = False
        self.planned = 0
        self.agreement: StepAgreement | None = None
        self.ask_others: Callable[[GroupError], StepAgreement] = _raise
        self._state = state
        # The scaler, or the norm, shows where a gradient is not finite.
        self._looks_at_gradients = state.scaler is None and arguments.norm_limit is None
        self._balancer = Balancer() if arguments.balance == "speed" and world.world_size > 1 else None
        has_row = is_asynchronous(state.device) and not state.waits_for_device
        self._row = DeviceRow(world, state.num_shards, state.device) if has_row else None
        self._random = RandomStates()
        losses = state.plan.losses
        self._networks = state.networks
        self._buffers = ShardZeroBuffers(state.kept_modules(), world, state.device)
        self._gradients = ShardReducer(trained, world, state.num_shards, arguments.bucket_limits)
        gradients = weakref.proxy(self._gradients)  # it holds the stopwatch
        self.stopwatch: Stopwatch = RecordedShards(self._recorder, lambda: gradients.last_gradient_ns)
        if self._balancer is not None and is_asynchronous(state.device):
            self.stopwatch = DeviceShards(state.device)
        self._gradients.on_last_gradient(self.stopwatch.last_gradient)
        self._gradients.send_besides(self._buffers.start_sending)
        self._random.own = OwnGenerators(model, losses[0] if len(losses) == 1 else losses)
        home = torch.device("cpu") if state.waits_for_device else state.device
        self._values = StepValues(world, state.num_shards, home)
        self._runs = ShardRuns(state, self._random.own, self._gradients, self._buffers, self._values)
        self._written_parameters = WrittenParameterCheck(
            model, reads_contents=state.num_shards > 1, others=self._networks.parameters
        )
        self._failed_step = FailedStep(state, world, self._gradients, self._written_parameters)
        self._model_changes = ModelChangeCheck(model, optimizer, trained)
        self._settings = SettingsChangeCheck()
        note = self._gradients.note_single_additions
        self._nested_backwards = NestedBackwardCheck(lambda adds_once: note(adds_once=adds_once))
        self._comparison = WorkerComparison(state, world, self._buffers)
        self._guards = StepGuards(separate_optimizers(optimizer), self)
        self._update = Update(state, arguments.norm_limit, self._guards)
        self._hooks = ParameterHooks(trained.trained, world)
        self._judge = StepJudge(state, arguments, self._row, self._update, self._buffers, self._hooks)

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective); `Trainer.step` says what it raises."""
        self._recorder.set_step(self._state.global_step)
        updates = self._state.plan.updates(self._state.global_step)
        reads = self._state.updates_made()
        should_stop = False
        for number, update in enumerate(updates, start=1):
            with self._hooks.taken_off():
                reads[update.name], should_stop = self._make_update(batch, update, is_last=number == len(updates))
        self._networks.check_gradients()
        is_end = self._state.cursor.step == 0 and batch.num_steps != 1
        read = reads[""] if "" in reads else merge_updates(reads, self._state.plan.main)
        return StepResult(cursor=batch.cursor, should_stop=should_stop and not is_end, read=read)

    def _make_update(
        self, batch: ShardedBatch, update: UpdateSpec, *, is_last: bool
    ) -> tuple[Callable[[], StepOutcome], bool]:
        """Make one of the updates of a step; return what reads its outcome, and whether a stop was requested."""
        self._enter(StepPhase.PREPARE)
        self._state.choose(update)
        table = StepTable(self.world, self._state.num_shards, self._row)
        try:
            self._written_parameters.forget()
            self._random.save()
            self._buffers.begin()
            tasks = self._prepare(batch)
            self._run_shards(batch, tasks, table, update)
            sums = self._agree(batch, table, update)
            try:
                read_values = self._values.exchange(sums.values, sums.weights)
            except GroupError as error:
                read_values = self.ask_others(error).means
            self.agreement = StepAgreement(sums, read_values)
            self._hooks.ask_others = self.ask_others
            decision = self._judge.decide(batch, sums)
            self._enter(StepPhase.COMMIT)
            self._commit(batch, decision, update, is_last=is_last)
        except BaseException as error:
            self._undo(error, batch, table)
            raise
        self._enter(StepPhase.IDLE)
        read = decision.read if read_values is None else with_values(decision.read, read_values)
        if any(status.end_requested for status in sums.statuses):
            self._state.note_end()
        return read, self._state.is_ending or any(status.stop_requested for status in sums.statuses)

    def number_shards(self, batch: ShardedBatch, order: Sequence[int]) -> dict[int, dict[str, str]]:
        """Compute shards in an order, and change nothing; return a hash of each loss and gradient by name (local)."""
        self._enter(StepPhase.PREPARE)
        self._random.save()
        self._buffers.begin()
        try:
            with self._hooks.taken_off():
                return number_shards(self._state, self._runs, self._buffers, batch, order)
        finally:
            self._buffers.undo()
            self._random.restore()
            self._state.model.zero_grad(set_to_none=True)
            self._enter(StepPhase.IDLE)

    def close(self) -> None:
        """Release hooks, threads and buckets, and the gradients that lie in them (local); not during a step."""
        if self.phase is StepPhase.CLOSED:
            return
        self._enter(StepPhase.CLOSED)
        self._guards.remove()
        self._gradients.close()
        self._state.model.zero_grad(set_to_none=True)

    def _enter(self, phase: StepPhase) -> None:
        """Enter another phase; every transition is made here."""
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            if self.phase is StepPhase.CLOSED:
                raise ValueError("The trainer was closed: no step can be taken any more. Make a new trainer. (LS529)")
            raise ValueError(
                f"The trainer is in the {self.phase.name} phase of a step: let the step end first. (LS529)"
            )
        self.phase = phase
        if phase is StepPhase.IDLE:
            self._recorder.set_step(self._state.global_step)
        self._recorder.mark(EventKind.PHASE, phase.value, 0, 0)

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
        self._comparison.begin()
        if self._row is not None:
            self._row.begin()
        self._trained.drop_gradients()  # all of them, also of what the optimizer does not train
        tasks = self._gradients.begin(batch.ranges)
        self._buffers.expect(len(tasks))
        self._written_parameters.begin()
        return tasks

    def _run_shards(
        self, batch: ShardedBatch, tasks: Sequence[ShardTask], table: StepTable, update: UpdateSpec
    ) -> None:
        """Run this worker's shards, and reduce (collective)."""
        self._enter(StepPhase.COMPUTE)
        is_known = self._nested_backwards.is_known(update.name)
        if not is_known:
            self._gradients.expect_nested_backward()
        self._runs.begin(update)
        self.stopwatch.start()
        self._runs.run(batch, tasks, table, self.stopwatch, watches_attributes=not is_known)
        self._enter(StepPhase.REDUCE)
        self._runs.end_last(tasks)

    def _agree(self, batch: ShardedBatch, table: StepTable, update: UpdateSpec) -> StepSums:
        """Exchange the step table, and check what all workers have sent, alike on all (collective)."""
        self._state.check_last_step()  # its row is here by now, and the device has this step to compute
        with batch.assignment.held():
            table.fill_in(batch, self._take_status(batch), self._take_numbers())
            self._wait_for_device()
            self._enter(StepPhase.AGREE)
            try:
                sums = table.exchange()
            except GroupError as error:
                sums = self.ask_others(error).sums
            check_progress(sums, self.world, self._state.failed_step)
            lost = self._failed_step.put_back_parameters(sums)
            raise_failure(sums, self.world, None)
            check_places(sums)
            if self._balancer is not None:
                seconds, last_requested = zip(
                    *((each.seconds, each.last_requested) for each in sums.statuses), strict=True
                )
                self._balancer.note(batch, seconds, max(last_requested))
        if sums.statuses[0].has_new_layout:
            try:
                self._buffers.exchange_new_layout()
            except GroupError as error:
                self.ask_others(error)
        check_written(sums, self._written_parameters.names, lost, batch)
        self._nested_backwards.check(sums, batch, update.name)
        self._comparison.check_options(sums.options, name_step(batch.cursor))
        self._comparison.check_values(sums.parameters, name_step(batch.cursor))
        return sums

    def _wait_for_device(self) -> None:
        """Wait for reduced gradients and shard 0's buffers, where workers continue without one that is lost (local).

        [Note: one call apart] in `lockstep.engine.member`: the host must know that it can end the step by itself.
        """
        if self._state.waits_for_device and is_asynchronous(self._state.device):
            torch.accelerator.synchronize(self._state.device)
            raise_if_broken(self.world.group)

    def _commit(self, batch: ShardedBatch, decision: Decision, update: UpdateSpec, *, is_last: bool) -> None:
        """Write the result of an update (local). The user's code, which may fail, comes first."""
        state = self._state
        purpose = f"update {update.name}" if update.name else "update"
        self._random.seed(derive_seed(purpose, state.seed, batch.cursor.epoch, batch.cursor.step))
        self._update.apply(decision.norm, is_skipped=decision.is_skipped, is_bad=decision.is_bad)
        try:
            if decision.is_skipped:
                self._buffers.undo()
            else:
                self._buffers.commit(decision.is_bad)
            state.advance(batch, is_last=is_last)
            self._random.discard()
            self._comparison.note_equal_values()
        except BaseException:  # a Ctrl-C: these calls raise nothing else
            state.mark_unusable("The optimizer had updated the parameters.")
            raise

    # -- A step that fails ---------------------------------------------------------------------------------------------

    def _undo(self, error: BaseException, batch: ShardedBatch, table: StepTable) -> None:
        """Put back what was recorded, and let the step fail on all workers (collective where others wait).

        Raises in place of `error` where that is a consequence of what another worker has raised.
        """
        failed_in = self.phase
        self._enter(StepPhase.IDLE)
        release_memory(error)
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
                if failed_in is StepPhase.AGREE:
                    self._failed_step.note_unchecked_writes()
                self._state.note_failed_step(name_step(batch.cursor), error)
            elif isinstance(error, Exception) and not isinstance(error, GroupError):
                # After a GroupError every worker has one, or has exited.
                has_reduced = failed_in is not StepPhase.PREPARE and self._gradients.has_reduced
                self._failed_step.report(error, table, getattr(batch, "ranges", ()), has_reduced=has_reduced)

    # -- The row of this worker ----------------------------------------------------------------------------------------

    def _take_status(self, batch: ShardedBatch) -> WorkerStatus:
        return WorkerStatus(
            num_steps=self._state.progress,
            seconds=self.stopwatch.seconds_per_shard(),
            last_requested=batch.assignment.last_requested,
            has_nested_backward=self._gradients.has_nested_backward,
            written=self._written_parameters.find_written() if self._state.num_shards > 1 else 0,
            has_new_layout=self.world.rank == 0 and self._buffers.has_new_layout(),
            stop_requested=self.stop_requested,
            has_hooks=self._hooks.are_there,
            planned=self.planned,
            end_requested=bool(self._state.end_reason or self._state.end_reason_after_step),
        )

    def _take_numbers(self) -> WorkerNumbers:
        gradients: Tensor | int = 0
        if self._looks_at_gradients and self._row is None:
            gradients = self._gradients.sum_for_finite_check(self._state.device)
        elif self._looks_at_gradients and self._row is not None:
            self._row.note_gradients(self._gradients.largest_magnitude(self._state.device))
        return WorkerNumbers(
            options=self._comparison.options_number(), values=self._comparison.values_number(), gradients=gradients
        )


def _raise(error: GroupError) -> StepAgreement:
    """Raise the error: there is no way to continue without a lost worker."""
    raise error
