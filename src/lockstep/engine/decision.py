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
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from lockstep.engine.batches import name_step
from lockstep.engine.device_row import DeviceRow, RowValues
from lockstep.engine.gradients import explain_late_nonfinite, explain_nonfinite
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_result import StepOutcome
from lockstep.engine.step_table import CurrentStep, Decision, WeightedLosses
from lockstep.engine.step_values import find_bad_loss
from lockstep.engine.update import Update
from lockstep.errors import LossError
from lockstep.processes.user_line import stacklevel_of_user

Means = Callable[[RowValues | None], Mapping[str, float]]


@final
class StepJudge:
    """Decides what becomes of each step, alike on all workers."""

    def __init__(self, runs: ShardRuns, update: Update) -> None:
        self._runs = runs
        self._state = runs.state
        self._skips_nonfinite = runs.arguments.nonfinite == "skip"
        self._max_grad_norm = runs.arguments.norm_limit
        self._update = update

    def decide(self, step: CurrentStep) -> Decision:
        norm: Tensor | None = None
        if not step.problem and self._state.scaler is None and self._max_grad_norm is not None:
            # The scaler does it itself. After the hooks, which may have put others in their place.
            norm = nn.utils.get_total_norm(
                each.grad for each in self._state.trained_parameters() if each.grad is not None
            )
        if self._runs.row is not None:
            return self._decide_on_device(step, norm, self._runs.row)
        is_suspect = step.may_be_nonfinite or (norm is not None and not math.isfinite(norm))
        problem = step.problem or self._look_at_gradients(step, norm, is_suspect=is_suspect)
        return self._decide_on_host(problem, step.losses, norm, self._runs.values.means()(None))

    def _look_at_gradients(self, step: CurrentStep, norm: Tensor | None, *, is_suspect: bool) -> str:
        """Return in words which gradient is not finite; empty if all are."""
        has_other_gradients = step.has_hooks and self._state.scaler is None  # which looks at them itself
        return explain_nonfinite(self._state, norm, step.place) if is_suspect or has_other_gradients else ""

    def _decide_on_host(
        self, problem: str, losses: WeightedLosses, norm: Tensor | None, values: Mapping[str, float]
    ) -> Decision:
        if problem and not self._skips_nonfinite:
            raise LossError(f"{problem} No parameter was changed. (LS516)")
        if problem:
            warnings.warn(f"{problem} The step is skipped on every worker. (LS516)", stacklevel=stacklevel_of_user())
        outcome = StepOutcome(
            loss=losses.mean_loss,
            weight=losses.weight,
            is_skipped=bool(problem),
            values=values,
            grad_norm=None if norm is None else float(norm),
        )
        if problem or self._state.scaler is None or self._max_grad_norm is None:
            return Decision(norm=norm, is_skipped=bool(problem), is_bad=None, read=lambda: outcome)
        late = torch.zeros((), device=self._state.device)  # the update writes it: it unscales the gradients first
        return Decision(norm=late, is_skipped=False, is_bad=None, read=lambda: replace(outcome, grad_norm=float(late)))

    def _decide_on_device(self, step: CurrentStep, norm: Tensor | None, row: DeviceRow) -> Decision:
        """[Note: an update that the device decides on]."""
        if norm is not None:
            row.note_norm(norm)
        is_bad = row.is_bad(step.total_weight if isinstance(step.total_weight, Tensor) else None)
        read_row, means = row.start_copy(), self._runs.values.means()
        can_be_left_out = self._update.can_be_left_out() and self._runs.buffers.can_be_left_out()
        if not can_be_left_out or step.has_hooks or step.has_new_layout or not self._state.may_be_unread:
            row_values = read_row()
            losses = _complete(step.losses, row_values)
            is_suspect = row_values.has_bad_gradient or not math.isfinite(row_values.norm)
            problem = find_bad_loss(losses, step.batch) or self._look_at_gradients(step, norm, is_suspect=is_suspect)
            return self._decide_on_host(problem, losses, norm, means(row_values))
        pending = _LaunchedStep(
            self._runs, step, read_row, means, skips_nonfinite=self._skips_nonfinite, has_norm=norm is not None
        )
        self._state.unread_step = pending
        return Decision(norm=norm, is_skipped=False, is_bad=is_bad, read=pending.read)


@final
class _LaunchedStep:
    """A step that was committed before the host knew whether it was bad."""

    def __init__(
        self,
        runs: ShardRuns,
        step: CurrentStep,
        read_row: Callable[[], RowValues],
        means: Means,
        *,
        skips_nonfinite: bool,
        has_norm: bool,
    ) -> None:
        self._state = runs.state
        self._batch = step.batch
        self._losses = step.losses
        self._read_row = read_row
        self._means = means
        self._skips_nonfinite = skips_nonfinite
        self._has_norm = has_norm
        self._restore_progress = self._state.record_progress()
        self._outcome: StepOutcome | None = None
        self.error: LossError | None = None

    def read(self) -> StepOutcome:
        """Return what the step has computed, and put its progress back if it is an error (local); waits once."""
        if self._outcome is None:
            values = self._read()
            losses = _complete(self._losses, values)
            problem = self._find_problem(losses, values)
            self._outcome = StepOutcome(
                loss=losses.mean_loss,
                weight=losses.weight,
                is_skipped=bool(problem),
                values=self._means(values),
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

    def _find_problem(self, losses: WeightedLosses, values: RowValues) -> str:
        try:
            problem = find_bad_loss(losses, self._batch)
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


def _complete(losses: WeightedLosses, values: RowValues) -> WeightedLosses:
    """Return the losses with what was on the device."""
    return WeightedLosses(values.losses, values.weights if losses.has_weights_on_device else losses.weights)
