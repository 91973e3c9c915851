"""What a step that all workers can finish comes to: an update, a step that is left out, or an error on all workers.

The gradients are searched for one that is not finite only where `lockstep.reduce.tensor_bits` has found a sum that is
not, or their norm is not.

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
from collections.abc import Callable, Iterable, Mapping
from typing import final

from torch import Tensor, nn

from lockstep.engine.batches import name_step
from lockstep.engine.losses import RowValues, find_bad_loss
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepOutcome, StepPart, WeightedLosses
from lockstep.errors import LossError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.modules import foreach_div_


@final
class ReducedGradients(StepPart):
    """Whether a backward runs another inside decides on the order of addition, on all workers alike.

    [Note: a backward inside a backward] in `lockstep.reduce.shard_reducer`. Gradients are not looked at where a scaler,
    or their norm, shows that one is not finite.
    """

    def __init__(self, runs: ShardRuns) -> None:
        self._state, self._trained, self._row = runs.state, runs.trained, runs.row
        self._gradients = gradients = runs.gradients
        self._looks = runs.state.scaler is None and runs.arguments.norm_limit is None
        self._has_inner = False
        self._known: set[str] = set()
        self._finite = Column(float, self._sum_for_finite_check)
        self._nested = Column(bool, lambda _: gradients.has_nested_backward)
        self.columns = self._finite, self._nested

    def begin(self, step: CurrentStep) -> None:
        self._trained.drop_gradients()  # all of them, also of what the optimizer does not train
        step.tasks = self._gradients.begin(step.batch.ranges)
        step.is_new_kind = step.update.name not in self._known
        if step.is_new_kind:
            self._gradients.expect_nested_backward()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        step.may_be_nonfinite = not all(map(math.isfinite, rows[self._finite]))
        rank = next((rank for rank, is_nested in enumerate(rows[self._nested]) if is_nested), None)
        is_late = rank is not None and not self._has_inner and not step.is_new_kind
        self._known.add(step.update.name)
        self._has_inner |= rank is not None
        self._gradients.note_single_additions(adds_once=not self._has_inner)
        if is_late:
            raise LossError(
                f"The backward of a loss on rank {rank} has run another backward inside, as a reentrant checkpoint "
                f"does, at {step.place}; in no step before has one. Depending on the number of workers, "
                "gradients may have been added in another order. Use torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False). From now on it is expected: this step may be taken again. No parameter was "
                "changed. (LS522)"
            )

    def change_gradients(self, step: CurrentStep) -> None:
        """Divide the gradients by the summed weight (collective where there is a row on the device)."""
        weight: float | Tensor = step.losses.weight
        if self._row is not None:
            self._row.exchange()
            if step.losses.has_weights_on_device:
                weight = self._row.total_weight(step.losses.weights)
        step.total_weight = weight
        gradients = require_gradients(self._state.trained_parameters(), step.place)
        if isinstance(weight, Tensor) or weight != step.batch.num_samples:
            foreach_div_(gradients, weight / step.batch.num_samples)

    def _sum_for_finite_check(self, _step: CurrentStep) -> Tensor | float:
        if not self._looks:
            return 0.0
        if self._row is None:
            return self._gradients.sum_for_finite_check(self._state.device)
        self._row.gradients.copy_(self._gradients.largest_magnitude(self._state.device) * 0.0)  # NaN of one that is bad
        return 0.0


def require_gradients(parameters: Iterable[nn.Parameter], place: str) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise LossError(
            f"No parameter of the optimizer has a gradient at {place}: the losses depend on none of them. Compute the "
            "loss from what the model, which the loss function is given, returns. (LS508)"
        )
    return gradients


def explain_nonfinite(state: RunState, norm: Tensor | None, place: str) -> str:
    """Return in words which gradient is not finite; empty if all are. On a GPU this waits for the device.

    Call it before gradients are clipped: a norm that is not finite makes all of them so.
    """
    trained = set(map(id, state.trained_parameters()))
    name = next(
        (name for name, each in state.model.named_parameters() if id(each) in trained and _is_nonfinite(each)), ""
    )
    what = "The gradient" if norm is None else f"The gradient's norm is {norm.item()}"
    if name:
        return (
            f"{what}{' is' if norm is None else ', for it is'} not finite in {name} at {place}, although "
            "the loss is finite. Look for a square root or logarithm of zero, or a division by it, in the model or "
            'the loss; or try a smaller learning rate. nonfinite="skip" leaves such steps out.'
        )
    if norm is None or math.isfinite(norm):
        return ""
    return f"{what} at {place}, although losses and gradients are finite. Try a smaller learning rate."


def explain_late_nonfinite(norm: float, name: str) -> str:
    """Return in words that the gradient of a step was not finite, where it is there no more; a norm of 0 is unknown."""
    what = "The gradient was not finite" if math.isfinite(norm) else f"The gradient's norm was {norm}"
    return (
        f"{what} at {name}, although the loss is finite. Look for a square root or logarithm of zero, or a division by "
        'it, in the model or the loss; or try a smaller learning rate. nonfinite="skip" leaves such steps out. An '
        "optimizer without fused=True shows in which parameter."
    )


def _is_nonfinite(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and not bool(parameter.grad.isfinite().all())


Means = Callable[[RowValues | None], Mapping[str, float]]


@final
class LaunchedStep:
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

    def find_error(self) -> LossError | None:
        self.read()
        return self.error

    def read(self) -> StepOutcome:
        """Return what the step has computed, and put its progress back if it is an error (local); waits once."""
        if self._outcome is None:
            values = self._read()
            losses = complete_losses(self._losses, values)
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


def complete_losses(losses: WeightedLosses, values: RowValues) -> WeightedLosses:
    return WeightedLosses(values.losses, values.weights if losses.has_weights_on_device else losses.weights)
