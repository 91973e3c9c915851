"""What a worker does when its step has failed: it takes part in the calls of the others, and sends them its error."""

import traceback
from collections.abc import Iterator, Sequence
from typing import cast, final

import torch

from lockstep.comm import World, capabilities_of
from lockstep.comm.capabilities import ReportsExits
from lockstep.engine.run_state import RunState
from lockstep.engine.step_checks import check_progress, raise_failure
from lockstep.engine.step_table import Failure, StepSums, StepTable
from lockstep.engine.written_parameters import WrittenParameterCheck
from lockstep.errors import GroupError, LossError, ReductionError, UnusableStateError
from lockstep.reduce import ShardReducer

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What errors say that are no `torch.OutOfMemoryError`: of the CPU's allocator, of cuBLAS and cuDNN."""


@final
class FailedStep:
    """Lets a step that has failed on this worker fail on all."""

    def __init__(
        self, state: RunState, world: World, gradients: ShardReducer, written_parameters: WrittenParameterCheck
    ) -> None:
        self._state = state
        self._world = world
        self._gradients = gradients
        self._written_parameters = written_parameters

    def report(self, error: Exception, table: StepTable, ranges: Sequence[range], *, has_reduced: bool) -> None:
        """Make the calls in which the other workers wait for this one, and send them the error (collective).

        The caller then raises `error`; this raises another one where `error` is only a consequence of a worker's, or an
        earlier step has failed on some workers alone.
        """
        self._read_last_step(error)
        is_consequence = has_reduced and self._gradients.has_failed_on_all
        failure = Failure.REDUCTION if is_consequence else Failure.OWN
        if isinstance(error, UnusableStateError):
            failure = Failure.UNUSABLE
        try:
            if not has_reduced:
                self._gradients.fail(ranges, error)
            table.fill_in_failure(failure, self._state.progress, self._find_written())
            sums = table.exchange()
            check_progress(sums, self._world, self._state.failed_step)
            self.put_back_parameters(sums)
            raise_failure(sums, self._world, None if is_consequence else error)
        except UnusableStateError as found:
            raise found from error
        except ReductionError as found:
            if is_consequence:
                raise found from error
        except GroupError:
            return  # the other workers have one too, or have exited
        except Exception as failure:  # noqa: BLE001 - it is not the cause, and `error` is raised
            error.add_note(f"The other workers could not be sent this error: {type(failure).__name__}: {failure}")
            self._leave_group(error)

    def _leave_group(self, error: Exception) -> None:
        """Let no worker wait for this one, which cannot make the calls in which they wait (local)."""
        group = self._world.group
        if group is not None and capabilities_of(group).reports_exits:
            cast("ReportsExits", group).report_failure(error)

    def _read_last_step(self, error: Exception) -> None:
        """Put the progress of a last step back that was not finite, as all workers do in this step (local)."""
        try:
            self._state.check_last_step()
        except LossError as last:
            error.add_note(f"The step before has failed too: {last}")
        except Exception as failure:  # noqa: BLE001 - a device that has failed; the other workers wait for this one
            self._state.mark_unusable("The loss of the step before could not be read.")
            error.add_note(f"The loss of the step before could not be read: {failure}")

    def put_back_parameters(self, sums: StepSums) -> list[str]:
        """Put back parameters that shards have written (collective where some have); return whose values are lost."""
        if not any(status.written for status in sums.statuses):
            return []
        try:
            lost = self._written_parameters.put_back(self._world)
        except BaseException:
            self._state.mark_unusable("A forward or the loss function had written parameters.")
            raise
        if lost:
            self._state.mark_unusable(f"A forward or the loss function had written to {', '.join(lost[:3])}.")
        return lost

    def note_unchecked_writes(self) -> None:
        """Note parameters that the only shard of a run has written, which is no error if the step succeeds (local)."""
        if self._state.num_shards == 1 and self._find_written():
            self._state.mark_unusable("A forward or the loss function had written parameters.")

    def _find_written(self) -> int:
        try:
            return self._written_parameters.find_written()
        except Exception:  # noqa: BLE001 - a device that has failed cannot be read, and the others wait for this worker
            self._state.mark_unusable("Whether a forward had written parameters could not be read.")
            return 0


def release_memory(error: BaseException) -> None:
    """Let go of what the frames of an error hold, where memory has run out (local).

    The activations of the step are there, and the calls that the other workers wait for may need memory. Other errors
    keep their frames, for a debugger.
    """
    for each in _chain(error):
        if _is_out_of_memory(each):
            for released in _chain(error):
                traceback.clear_frames(released.__traceback__)
            return


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
