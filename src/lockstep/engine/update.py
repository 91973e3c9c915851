"""The update of a step: whether it is made, what it calls of the user's objects, and how an error in it is handled.

Commit writes to what lasts, so an error there cannot simply be undone. An optimizer that raises has often written
nothing yet: a hook before its step has failed, or the memory for its state. Then the step is as if it had not begun.
Else the state is *unusable*: parameters and optimizer belong to no step, and a checkpoint must be loaded.

[Note: what an optimizer has written] A tensor counts its writes (`_version`), so tensors that are the same objects with
the same counts were not written. Writes through `.data` are not counted. So before the first update a sum of all bits
of the parameters is taken too; if all that had a gradient were counted as written then, counts are enough from then on.
"""

import copy
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.decision import LaunchedStep, complete_losses, explain_nonfinite
from lockstep.engine.losses import DeviceRow, find_bad_loss
from lockstep.engine.optimizers import guard_steps, separate_optimizers, steps_allowed
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import CurrentStep, Decision, StepOutcome, WeightedLosses
from lockstep.errors import LossError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.shards import derive_seed
from lockstep.torch_private.modules import (
    forget_scaling,
    has_step_on_device,
    optimizer_step_pre_hooks,
    step_unless,
    version_of,
)

_WRITTEN_BY_OPTIMIZER = "It had changed a part of the parameters or of the optimizer's state."
_WRITTEN_BEFORE_SCHEDULER = "The optimizer had updated the parameters when the scheduler failed."
_WRITTEN_BY_SCHEDULER = "The scheduler's state could not be put back."


@final
class Update:
    def __init__(self, runs: ShardRuns, owner: object) -> None:
        self._state = state = runs.state
        self._runs = runs
        self._skips_nonfinite = runs.arguments.nonfinite == "skip"
        self._max_grad_norm = runs.arguments.norm_limit
        self._owner = weakref.ref(owner)  # which holds this: a cycle would keep its group open for long
        self._guards = [guard_steps(each, owner) for each in separate_optimizers(state.optimizer)]
        self._parameters = list(state.model.parameters())
        self._has_updated_scaler = False
        self._updated: set[nn.Parameter] = set()
        self._updated_state: object = None

    def _can_be_left_out(self) -> bool:
        """Not the first of a parameter: an optimizer that is left out has made its state, but not filled it (local)."""
        if self._state.scaler is not None or not has_step_on_device(self._state.optimizer):
            return False
        if len(optimizer_step_pre_hooks(self._state.optimizer)) > 1:  # one is our guard
            return False
        return self._updated_state is self._state.optimizer.state and self._updated >= self._with_gradient()

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
            row.norm.copy_(norm)
        is_bad = row.is_bad(step.total_weight if isinstance(step.total_weight, Tensor) else None)
        read_row, means = row.start_copy(), self._runs.values.means()
        can_be_left_out = self._can_be_left_out() and self._runs.buffers.can_be_left_out()
        # A callback that looks at a step must not look at one that is undone when its loss is read.
        is_looked_at = bool(self._state.callbacks.of("on_step"))
        if not can_be_left_out or step.has_hooks or step.has_new_layout or is_looked_at:
            row_values = read_row()
            losses = complete_losses(step.losses, row_values)
            is_suspect = row_values.has_bad_gradient or not math.isfinite(row_values.norm)
            problem = find_bad_loss(losses, step.batch) or self._look_at_gradients(step, norm, is_suspect=is_suspect)
            return self._decide_on_host(problem, losses, norm, means(row_values))
        pending = LaunchedStep(
            self._runs, step, read_row, means, skips_nonfinite=self._skips_nonfinite, has_norm=norm is not None
        )
        self._state.unread_step = pending.find_error
        return Decision(norm=norm, is_skipped=False, is_bad=is_bad, read=pending.read)

    def close(self) -> None:
        for guard in self._guards:
            guard.trainers.discard(self._owner())

    def apply(self, step: CurrentStep, decision: Decision) -> None:
        """Clip, update and step the scheduler (local). An error has changed nothing, or marks the state as unusable.

        With a scaler the norm is computed here, and written into that of the decision. Where that is bad on the device,
        the device leaves the update out; only where it can do that.
        """
        purpose = f"update {step.update.name}" if step.update.name else "update"
        self._runs.random.seed(derive_seed(purpose, self._state.seed, step.batch.cursor.epoch, step.batch.cursor.step))
        if decision.is_skipped:
            self._step_scheduler_alone()
            return
        norm, is_bad = decision.norm, decision.is_bad
        chosen = step.update.chosen
        known = self._state.findings.counts_are_enough
        counts_are_enough = known.get(chosen)
        before = _WriteRecord(self._state, self._parameters, reads_bits=counts_are_enough is None)
        self._has_updated_scaler = False
        try:
            self._step_optimizer(norm, is_bad)
        except BaseException:
            is_written = self._has_updated_scaler or self._state.sharing.has_written
            if is_written or counts_are_enough is False or before.has_changed():
                self._state.mark_unusable(_WRITTEN_BY_OPTIMIZER)
            else:
                before.put_back_options()
                if self._state.scaler is not None:  # what `unscale_` and `step` have noted since the last `update`
                    for optimizer in self._state.chosen():
                        forget_scaling(self._state.scaler, optimizer)
            raise
        if is_bad is None and has_step_on_device(self._state.optimizer):
            self._updated, self._updated_state = self._with_gradient(), self._state.optimizer.state
        if counts_are_enough is None and before.has_changed():
            known[chosen] = before.counts_show_all()
        if self._state.scheduler is not None:
            with self._unusable_on_error(_WRITTEN_BEFORE_SCHEDULER):
                self._state.scheduler.step()

    def _step_scheduler_alone(self) -> None:
        scheduler = self._state.scheduler
        if scheduler is None:
            return
        saved, before = copy.deepcopy(scheduler.state_dict()), _WriteRecord(self._state, (), reads_bits=False)
        try:
            scheduler.step()
        except BaseException:
            with self._unusable_on_error(_WRITTEN_BY_SCHEDULER):
                scheduler.load_state_dict(saved)
            before.put_back_options()
            raise

    @contextmanager
    def _unusable_on_error(self, reason: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._state.mark_unusable(reason)
            raise

    def _with_gradient(self) -> set[nn.Parameter]:
        return {parameter for parameter in self._state.trained_parameters() if parameter.grad is not None}

    def _step_optimizer(self, norm: Tensor | None, is_bad: Tensor | None) -> None:
        optimizer, scaler = self._state.optimizer, self._state.scaler
        trained = list(self._state.trained_parameters())
        # A scaler raises where an optimizer has no gradient at all, as one whose parameters are frozen.
        scaled = [part for part in self._state.chosen() if _has_gradient(part)] if scaler is not None else []
        if scaler is not None and (norm is not None or self._state.sharing):  # which looks at whole gradients
            for part in scaled:
                scaler.unscale_(part)
        if scaler is not None and norm is not None:
            given, norm = norm, nn.utils.get_total_norm(each.grad for each in trained if each.grad is not None)
            given.copy_(norm)
        if self._max_grad_norm is not None and norm is not None and not math.isinf(self._max_grad_norm):
            nn.utils.clip_grads_with_norm_(trained, self._max_grad_norm, norm)
        with steps_allowed(self._guards), self._state.sharing.update(self._state.chosen(), self._runs.world):
            if is_bad is not None:
                step_unless(optimizer, is_bad)
            elif scaler is None:
                optimizer.step()
            else:  # it leaves the step out where a gradient is not finite, and lowers its scale
                for part in scaled:
                    scaler.step(part)
                self._has_updated_scaler = True
                scaler.update()


@final
class _WriteRecord:
    def __init__(self, state: RunState, parameters: Sequence[nn.Parameter], *, reads_bits: bool) -> None:
        self._optimizer = state.optimizer
        self._trained = state.trained_parameters
        self._parameters = parameters
        self._counts = list(map(version_of, parameters))
        self._values = self._list_state()
        self._value_counts = _count_writes(self._values)
        self._options = [dict(group) for group in state.optimizer.param_groups]
        self._bits = sum_of_bits(parameters) if reads_bits else None

    def has_changed(self) -> bool:
        values = self._list_state()
        return (
            list(map(version_of, self._parameters)) != self._counts
            or len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or _count_writes(values) != self._value_counts
            or not all(isinstance(value, Tensor | int | float | str | None) for value in values)
            or (self._bits is not None and bool(sum_of_bits(self._parameters) != self._bits))
        )

    def put_back_options(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.clear()
            group.update(options)

    def counts_show_all(self) -> bool:
        """Return whether the writes of an update to all parameters that have a gradient were counted."""
        held = set(map(id, self._trained()))
        counted = zip(self._parameters, self._counts, strict=True)
        return all(
            version_of(parameter) != count
            for parameter, count in counted
            if id(parameter) in held and parameter.grad is not None
        )

    def _list_state(self) -> list[Any]:
        entries = self._optimizer.state.values()
        return list(chain.from_iterable(each.values() if isinstance(each, dict) else [each] for each in entries))


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def _count_writes(values: Sequence[Any]) -> list[int]:
    return [version_of(value) if isinstance(value, Tensor) else 0 for value in values]
