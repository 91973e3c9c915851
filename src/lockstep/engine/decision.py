"""What a step that all workers can finish comes to: an update, a step that is left out, or an error on all workers.

[Note: an update that the device decides on] On an asynchronous device the host knows neither losses nor gradients, and
to wait for them leaves the device without work. Where the optimizer can leave its step out on the device (torch's own
with `fused=True`), and so can the buffers, the host launches the update at once, with a truth value on the device for
whether the step is bad. It reads the row of the step when it has launched the next one. If the step was bad,
parameters, optimizer and buffers are those of before it; with nonfinite="stop" cursor, scheduler and options of the
optimizer are put back, and the error is raised, in that next step. Other optimizers need the host's decision: it reads
the row first.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from lockstep.data import ShardedBatch
from lockstep.engine.arguments import TrainerArguments
from lockstep.engine.batches import name_step
from lockstep.engine.buffers import ShardZeroBuffers
from lockstep.engine.device_row import DeviceRow, RowValues
from lockstep.engine.gradients import explain_late_nonfinite, explain_nonfinite, require_gradients
from lockstep.engine.parameter_hooks import ParameterHooks
from lockstep.engine.run_state import RunState
from lockstep.engine.step_checks import find_bad_loss
from lockstep.engine.step_result import StepOutcome
from lockstep.engine.step_table import StepSums
from lockstep.engine.update import Update
from lockstep.errors import LossError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.modules import foreach_div_


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all workers have decided to commit."""

    norm: Tensor | None
    """The gradient's norm, where it is clipped."""
    is_skipped: bool
    """Whether parameters, buffers and optimizer stay as they are."""
    is_bad: Tensor | None
    """On the device, whether they stay as they are all the same; None where the host knows that they do not."""
    read: Callable[[], StepOutcome]


@final
class StepJudge:
    """Decides what becomes of each step, alike on all workers; `row` is None where the model is on the CPU."""

    def __init__(
        self,
        state: RunState,
        arguments: TrainerArguments,
        row: DeviceRow | None,
        update: Update,
        buffers: ShardZeroBuffers,
        hooks: ParameterHooks,
    ) -> None:
        self._state = state
        self._skips_nonfinite = arguments.nonfinite == "skip"
        self._max_grad_norm = arguments.norm_limit
        self._row = row
        self._update = update
        self._buffers = buffers
        self._hooks = hooks

    def decide(self, batch: ShardedBatch, sums: StepSums) -> Decision:
        """Decide on a step (collective on an asynchronous device)."""
        if self._row is not None:
            return self._decide_on_device(batch, sums, self._row)
        norm: Tensor | None = None
        problem = find_bad_loss(sums, batch)
        if not problem:
            norm = self._prepare_gradients(batch, sums, sums.weight)
            has_other_gradients = sums.has_hooks and self._state.scaler is None  # which looks at them itself
            if sums.may_be_nonfinite or has_other_gradients or (norm is not None and not math.isfinite(norm)):
                problem = explain_nonfinite(self._state, norm, name_step(batch.cursor))
        return self._decide_on_host(problem, sums, norm)

    def _decide_on_host(self, problem: str, sums: StepSums, norm: Tensor | None) -> Decision:
        if problem and not self._skips_nonfinite:
            raise LossError(f"{problem} No parameter was changed. (LS516)")
        if problem:
            warnings.warn(f"{problem} The step is skipped on every worker. (LS516)", stacklevel=stacklevel_of_user())
        outcome = StepOutcome(
            loss=sums.mean_loss,
            weight=sums.weight,
            is_skipped=bool(problem),
            grad_norm=None if norm is None else float(norm),
        )
        if problem or self._state.scaler is None or self._max_grad_norm is None:
            return Decision(norm=norm, is_skipped=bool(problem), is_bad=None, read=lambda: outcome)
        late = torch.zeros((), device=self._state.device)  # the update writes it: it unscales the gradients first
        return Decision(norm=late, is_skipped=False, is_bad=None, read=lambda: replace(outcome, grad_norm=float(late)))

    def _prepare_gradients(self, batch: ShardedBatch, sums: StepSums, weight: float | Tensor) -> Tensor | None:
        """Divide the gradients by the summed weight; return their norm if they are clipped, and no scaler does it."""
        gradients = require_gradients(self._state.trained_parameters(), name_step(batch.cursor))
        if isinstance(weight, Tensor) or weight != batch.num_samples:
            foreach_div_(gradients, weight / batch.num_samples)
        if sums.has_hooks:
            self._hooks.call()
            gradients = [each.grad for each in self._state.trained_parameters() if each.grad is not None]
        if self._state.scaler is None and self._max_grad_norm is not None:
            return nn.utils.get_total_norm(gradients)
        return None

    def _decide_on_device(self, batch: ShardedBatch, sums: StepSums, row: DeviceRow) -> Decision:
        """[Note: an update that the device decides on]."""
        row.exchange()
        total = row.total_weight(sums.weights) if sums.has_weights_on_device else None
        if total is None:
            find_bad_loss(sums, batch)  # it raises where no shard has a weight
        norm = self._prepare_gradients(batch, sums, sums.weight if total is None else total)
        if norm is not None:
            row.note_norm(norm)
        is_bad = row.is_bad(total)
        read_row = row.start_copy()
        can_be_left_out = self._update.can_be_left_out() and self._buffers.can_be_left_out()
        can_be_left_out = can_be_left_out and not sums.has_hooks
        if not (can_be_left_out and self._state.may_be_unread) or sums.statuses[0].has_new_layout:
            return self._decide_after_reading(batch, sums, norm, read_row())
        pending = _LaunchedStep(
            self._state, batch, sums, read_row, skips_nonfinite=self._skips_nonfinite, has_norm=norm is not None
        )
        self._state.unread_step = pending
        return Decision(norm=norm, is_skipped=False, is_bad=is_bad, read=pending.read)

    def _decide_after_reading(
        self, batch: ShardedBatch, sums: StepSums, norm: Tensor | None, values: RowValues
    ) -> Decision:
        sums = _complete(sums, values)
        problem = find_bad_loss(sums, batch)
        has_other_gradients = sums.has_hooks and self._state.scaler is None  # which looks at them itself
        is_suspect = values.has_bad_gradient or has_other_gradients or not math.isfinite(values.norm)
        if not problem and is_suspect:
            problem = explain_nonfinite(self._state, norm, name_step(batch.cursor))
        return self._decide_on_host(problem, sums, norm)


@final
class _LaunchedStep:
    """A step that was committed before the host knew whether it was bad."""

    def __init__(
        self,
        state: RunState,
        batch: ShardedBatch,
        sums: StepSums,
        read_row: Callable[[], RowValues],
        *,
        skips_nonfinite: bool,
        has_norm: bool,
    ) -> None:
        self._state = state
        self._batch = batch
        self._sums = sums
        self._read_row = read_row
        self._skips_nonfinite = skips_nonfinite
        self._has_norm = has_norm
        self._restore_progress = state.record_progress()
        self._outcome: StepOutcome | None = None
        self.error: LossError | None = None

    def read(self) -> StepOutcome:
        """Return what the step has computed, and put its progress back if it is an error (local); waits once."""
        if self._outcome is None:
            values = self._read()
            sums = _complete(self._sums, values)
            problem = self._find_problem(sums, values)
            self._outcome = StepOutcome(
                loss=sums.mean_loss,
                weight=sums.weight,
                is_skipped=bool(problem),
                grad_norm=values.norm if self._has_norm else None,
            )
            if problem:
                self._follow(problem)
        return self._outcome

    def _read(self) -> RowValues:
        try:
            return self._read_row()
        except BaseException:
            self._state.mark_unusable("The device had not finished the last step, whose update was launched.")
            raise

    def _find_problem(self, sums: StepSums, values: RowValues) -> str:
        try:
            problem = find_bad_loss(sums, self._batch)
        except LossError as error:
            self.error = error
            return str(error)
        if not problem and (values.has_bad_gradient or not math.isfinite(values.norm)):
            problem = explain_late_nonfinite(values.norm, name_step(self._batch.cursor))
        return problem

    def _follow(self, problem: str) -> None:
        if self._skips_nonfinite and self.error is None:
            warnings.warn(f"{problem} The step was skipped on every worker. (LS516)", stacklevel=stacklevel_of_user())
            return
        self._restore_progress()
        self.error = self.error or LossError(
            f"{problem} No parameter was changed by it. The step was launched before its loss was known; the trainer's "
            "cursor is at it again. (LS516)"
        )


def _complete(sums: StepSums, values: RowValues) -> StepSums:
    """Return the sums with what was on the device."""
    weights = values.weights if sums.has_weights_on_device else sums.weights
    return replace(sums, losses=values.losses, weights=weights)
