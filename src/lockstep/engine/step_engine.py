"""The engine of a step: made for one set of workers, a *generation*, and closed with it.

    IDLE
    PREPARE   parts begin: buffers, generators and what parameters there are, are recorded; batch, model and settings
              are looked at; the user's hooks are taken off the parameters; gradients are dropped
    COMPUTE   for each shard of this worker, largest subtree first:
                  seed from (seed, epoch, step, shard) -> the user's forward and loss -> loss * weight -> backward
              gradients are added in tree order; the last shard's backward starts to send buckets
    REDUCE    the rest of the buckets, shard 0's buffers beside the last one; wait; fill in the step table
    AGREE     exchange the table -> parts check what all workers say, and change the gradients: these are divided
              -> the second exchange, if a part has asked for it, in which the user's hooks on parameters are called
              -> look for what is not finite
    COMMIT    seed from (seed, epoch, step) -> clip -> the user's optimizer and scheduler -> parts commit: buffers,
              cursor + 1; the hooks are put on again
    IDLE      the user's callbacks, by whoever has called the engine

`STEP_PARTS` lists what takes part; the engine itself knows no part but those that compute. Before COMMIT nothing that
lasts is written, but for what a part records in `begin` and puts back in `undo`. A worker that fails before AGREE takes
part in the reduction with nothing, and in the exchange of tables with its failure, so that the step fails on all
workers ([Note: the commit point] in `lockstep.engine.step_table`).

Where workers continue without one that is lost, both exchanges of the table ask the others if they fail: it may have
failed here alone, and the worker then has all to finish the step but what that exchange returns.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final, TypeVar, cast, final

import torch
from torch import Tensor

from lockstep.comm import World, broadcast_tensors, capabilities_of, raise_if_broken
from lockstep.comm.capabilities import ReportsExits
from lockstep.data import ShardedBatch
from lockstep.devices.inventory import describe_bytes
from lockstep.devices.transfer import is_asynchronous
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.engine.arguments import TrainerArguments, check_fingerprints, check_same_arguments
from lockstep.engine.audit import AuditedStep
from lockstep.engine.balance import ShardBalance
from lockstep.engine.batches import gather_results
from lockstep.engine.buffers import without_repeats
from lockstep.engine.comparison import WorkerComparison
from lockstep.engine.decision import ReducedGradients
from lockstep.engine.first_steps import FirstSteps
from lockstep.engine.parameters import WrittenParameters
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_checks import SameBatch, SameSettings, StepProgress, StepRequests
from lockstep.engine.step_table import CurrentStep, Failure, StepOutcome, StepPart, StepResult, StepTable, merge_updates
from lockstep.engine.update import Update
from lockstep.errors import GroupError, LossError, ReductionError, UnusableStateError, chain_of
from lockstep.recording import EventKind, own_recorder
from lockstep.recording.file_format import StepPhase
from lockstep.reduce import TrainedModel, check_same_model
from lockstep.reduce.model import Description

Part = TypeVar("Part", bound=StepPart)

STEP_PARTS: Sequence[Callable[[ShardRuns], StepPart]] = (
    lambda runs: runs.buffers,  # first: a worker that fails in a later part sends the buffers of this step
    lambda runs: runs.random,
    lambda runs: WrittenParameters(runs.state, runs.world),
    StepProgress,
    SameBatch,
    SameSettings,
    lambda runs: runs.hooks,
    AuditedStep,  # before the user's code, which may write to samples
    FirstSteps,  # before the gradients of the step: a loss may have a backward of its own
    ReducedGradients,
    WorkerComparison,
    lambda runs: runs.losses,
    lambda runs: runs.values,
    lambda runs: ShardBalance(runs.stopwatch),
    StepRequests,
)
"""What takes part in each step, in the order in which parts begin, check and commit; they are undone in the opposite
one. Each is made from what computes the shards."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What errors say that are no `torch.OutOfMemoryError`: of the CPU's allocator, of cuBLAS and cuDNN."""


ALLOWED_TRANSITIONS: Final = {
    StepPhase.IDLE: {StepPhase.PREPARE, StepPhase.CLOSED},
    StepPhase.PREPARE: {StepPhase.COMPUTE, StepPhase.IDLE},
    StepPhase.COMPUTE: {StepPhase.REDUCE, StepPhase.IDLE},
    StepPhase.REDUCE: {StepPhase.AGREE, StepPhase.IDLE},
    StepPhase.AGREE: {StepPhase.COMMIT, StepPhase.IDLE},
    StepPhase.COMMIT: {StepPhase.IDLE},
    StepPhase.CLOSED: set[StepPhase](),
}
"""Which phase may follow on which; the lower arrows are those of a step that fails.

    IDLE -> PREPARE -> COMPUTE -> REDUCE -> AGREE -> COMMIT -> IDLE -> CLOSED
               |          |          |        |        |
               +----------+----------+--------+--------+--> IDLE
"""


@final
class StepEngine:
    """Constructing is collective; rank 0's parameters and buffers become those of all workers.

    With `descriptions` None (workers continue without others) it is local: the next step compares.
    """

    def __init__(
        self, state: RunState, arguments: TrainerArguments, world: World, descriptions: Sequence[Description] | None
    ) -> None:
        record_this_worker(world.rank, world.world_size)
        state.networks.find()
        trained = TrainedModel(state.model)
        if descriptions is not None:
            check_same_model(trained, world)
            check_same_arguments(descriptions)
            check_same_arguments(gather_results(world, state.parts.describe, "constructing a Trainer"))
            check_fingerprints(state.fingerprint(), world)
            if world.group is not None:
                broadcast_tensors(((name, without_repeats(each)) for name, each in trained.tensors()), world.group)
        self.world = world
        self.phase = StepPhase.IDLE
        self._state = state
        self._recorder = own_recorder()
        self.runs = ShardRuns(state, arguments, trained, world)
        self.table = StepTable(world, state.num_shards, state.device)
        self._parts = [make(self.runs) for make in STEP_PARTS]
        self.requests = self.part(StepRequests)
        self._update = Update(self.runs, owner=self)

    def part(self, kind: type[Part]) -> Part:
        return next(part for part in self._parts if isinstance(part, kind))

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective); `Trainer.step` says what it raises."""
        self._recorder.set_step(self._state.global_step)
        updates = self._state.plan.updates(self._state.global_step)
        reads = self._state.updates_made()
        should_stop = False
        for number, update in enumerate(updates, start=1):
            step = CurrentStep(batch, update, is_last=number == len(updates))
            reads[update.name], should_stop = self._make_update(step)
        self._state.networks.check_gradients()
        is_end = self._state.cursor.step == 0 and batch.num_steps != 1
        read = reads[""] if "" in reads else merge_updates(reads, self._state.plan.main)
        return StepResult(cursor=batch.cursor, should_stop=should_stop and not is_end, read=read)

    def _make_update(self, step: CurrentStep) -> tuple[Callable[[], StepOutcome], bool]:
        """Make one of the updates of a step; return what reads its outcome, and whether a stop was requested."""
        self._enter(StepPhase.PREPARE)
        self._state.choose(step.update)
        try:
            self._state.sharing.follow_groups(self.world)
            if self._state.networks.has_changed():
                self.runs.buffers.cover(self._state.kept_modules())
                self._state.findings.num_contents_compared = 0
            for part in self._parts:
                part.begin(step)
            self._enter(StepPhase.COMPUTE)
            self.runs.run(step)
            self._state.networks.check_made(step.place)
            self._enter(StepPhase.REDUCE)
            self.runs.end_last(step)
            self._agree(step)
            decision = step.decision = self._update.decide(step)
            self._enter(StepPhase.COMMIT)
            self._update.apply(step, decision)  # the user's code, which may fail, comes first
            self._commit(step)
        except BaseException as error:
            self._undo(error, step)
            raise
        self._enter(StepPhase.IDLE)
        assert step.rows is not None
        return decision.read, self.requests.should_stop(step.rows)

    def _agree(self, step: CurrentStep) -> None:
        """Exchange the table, let parts check it, and exchange what they have asked for (collective)."""
        self._state.check_last_step()  # its row is here by now, and the device has this step to compute
        with step.batch.assignment.held():
            rows = self.table.fill_in(step, self._parts)
            self._wait_for_device()
            self._enter(StepPhase.AGREE)
            self.table.agree(step, rows)
            for part in self._parts:
                part.check(step, rows)
        if not step.problem:
            for part in self._parts:
                part.change_gradients(step)
        self.table.answer(step, self.requests.planned_on_any(rows))

    def _wait_for_device(self) -> None:
        """[Note: one call apart] in `lockstep.engine.member`: the host must know that it can end the step by itself."""
        if self._state.waits_for_device and is_asynchronous(self._state.device):
            torch.accelerator.synchronize(self._state.device)
            raise_if_broken(self.world.group)

    def _commit(self, step: CurrentStep) -> None:
        try:
            for part in self._parts:
                part.commit(step)
        except BaseException:  # a Ctrl-C: these calls raise nothing else
            self._state.mark_unusable("The optimizer had updated the parameters.")
            raise

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Let shards be computed between two steps, and put back what that changes (local)."""
        self._enter(StepPhase.PREPARE)
        self.runs.random.save()
        self.runs.buffers.record()
        try:
            with self.runs.hooks.taken_off():
                yield
        finally:
            self.runs.buffers.put_back()
            self.runs.random.restore()
            self._state.model.zero_grad(set_to_none=True)
            self._enter(StepPhase.IDLE)

    def close(self) -> None:
        """Release hooks, threads and buckets, and the gradients that lie in them (local); not during a step."""
        if self.phase is StepPhase.CLOSED:
            return
        self._enter(StepPhase.CLOSED)
        self._update.close()
        self.runs.gradients.close()
        self._state.sharing.forget_group()
        self._state.model.zero_grad(set_to_none=True)

    def _enter(self, phase: StepPhase) -> None:
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            if self.phase is StepPhase.CLOSED:
                raise ValueError("The trainer was closed: no step can be taken any more. Make a new trainer. (LS529)")
            raise ValueError(
                f"The trainer is in the {self.phase.name} phase of a step: let the step end first. (LS529)"
            )
        self.phase = phase
        if phase is StepPhase.IDLE:
            self._recorder.set_step(self._state.global_step)
        self._recorder.mark(EventKind.PHASE, phase, 0, 0)

    # -- A step that fails ---------------------------------------------------------------------------------------------

    def _undo(self, error: BaseException, step: CurrentStep) -> None:
        """Put back what was recorded, and let the step fail on all workers (collective where others wait).

        Raises in place of `error` where that is a consequence of what another worker has raised.
        """
        failed_in = self.phase
        self._enter(StepPhase.IDLE)
        if any(map(_is_out_of_memory, chain_of(error))):
            _release_memory(error)
            error.add_note(self._describe_memory())
        try:
            self._undo_parts(step)
        finally:
            # An error in the last two phases may be one of this worker alone, and others have finished the step.
            if isinstance(error, UnusableStateError) and failed_in is StepPhase.AGREE:
                pass  # of an earlier step, which is noted already
            elif failed_in in {StepPhase.AGREE, StepPhase.COMMIT}:
                self._state.note_failed_step(step.place, error)
            elif isinstance(error, Exception) and not isinstance(error, GroupError):
                # After a GroupError every worker has one, or has exited.
                has_reduced = failed_in is not StepPhase.PREPARE and self.runs.gradients.has_reduced
                self._report(error, step, has_reduced=has_reduced)

    def _describe_memory(self) -> str:
        """Return in words what the run keeps on this worker, and what takes less."""
        trained = sum(each.parameter.nbytes for each in self.runs.trained.trained)
        states = self._state.optimizer.state.values()
        values = chain.from_iterable(each.values() for each in states if isinstance(each, dict))
        num_bytes = self._state.sharing.num_bytes or sum(each.nbytes for each in values if isinstance(each, Tensor))
        advice = "a smaller batch, or more shards (accumulate), takes less for activations"
        if self.world.world_size > 1 and not self._state.sharing:
            advice += "; shard_optimizer=True keeps a part of the optimizer's state on each worker"
        return (
            f"This worker keeps {describe_bytes(trained)} of trained parameters, as much for their gradients, and "
            f"{describe_bytes(num_bytes)} of the optimizer's state so far: {advice}."
        )

    def _undo_parts(self, step: CurrentStep) -> None:
        failure: BaseException | None = None
        for part in reversed(self._parts):
            try:
                part.undo(step)
            except BaseException as error:  # noqa: BLE001 - raised when the other parts are undone
                failure = error
        if failure is not None:
            self._state.mark_unusable("Buffers or random generators could not be put back.")
            raise failure

    def _report(self, error: Exception, step: CurrentStep, *, has_reduced: bool) -> None:
        """Make the calls in which the other workers wait for this one, and send them the error (collective).

        The caller then raises `error`; this raises another one where `error` is only a consequence of a worker's, or an
        earlier step has failed on some workers alone.
        """
        self._read_last_step(error)
        is_consequence = has_reduced and self.runs.gradients.has_failed_on_all
        step.failure = Failure.REDUCTION if is_consequence else Failure.OWN
        if isinstance(error, UnusableStateError):
            step.failure = Failure.UNUSABLE
        step.error = None if is_consequence else error
        try:
            if not has_reduced:
                self.runs.gradients.fail(getattr(step.batch, "ranges", ()))
            rows = self.table.fill_in(step, self._parts)
            self.table.agree(step, rows)
            for part in self._parts[: self._parts.index(self.part(StepProgress)) + 1]:  # which raises, for all
                part.check(step, rows)
        except UnusableStateError as found:
            raise found from error
        except ReductionError as found:
            if is_consequence:
                raise found from error
        except GroupError:
            return  # the other workers have one too, or have exited
        except Exception as failure:  # noqa: BLE001 - it is not the cause, and `error` is raised
            error.add_note(f"The other workers could not be sent this error: {type(failure).__name__}: {failure}")
            group = self.world.group
            if group is not None and capabilities_of(group).reports_exits:  # no worker is to wait for this one
                cast("ReportsExits", group).report_failure(error)
        finally:
            step.error = None  # its traceback has this frame: a cycle, which would keep what the frames hold

    def _read_last_step(self, error: Exception) -> None:
        """Put the progress of a last step back that was not finite, as all workers do in this step (local)."""
        try:
            self._state.check_last_step()
        except LossError as last:
            error.add_note(f"The step before has failed too: {last}")
        except Exception as failure:  # noqa: BLE001 - a device that has failed; the other workers wait for this one
            self._state.mark_unusable("The loss of the step before could not be read.")
            error.add_note(f"The loss of the step before could not be read: {failure}")


def _release_memory(error: BaseException) -> None:
    """Clear the error's frames: the next calls need that memory."""
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
