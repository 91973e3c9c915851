"""The gradients of a step as a part of it: taken anew for each step, and looked at when they are reduced.

They are searched for one that is not finite only where `lockstep.reduce.tensor_bits` has found a sum that is not, or
their norm is not.
"""

import math
from collections.abc import Iterable
from typing import final

from torch import Tensor, nn

from lockstep.engine.run_state import RunState
from lockstep.engine.shard_runs import ShardRuns
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.errors import LossError
from lockstep.torch_private.modules import foreach_div_


@final
class ReducedGradients(StepPart):
    """Begins with the gradients of a step, and finds out whether they are finite, and whether a backward runs another.

    Whether a backward runs another one inside decides on the order of addition, on all workers alike:
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
        """Return a number that is not finite if a gradient is not, in the part that this worker looks at (local)."""
        if not self._looks:
            return 0.0
        if self._row is None:
            return self._gradients.sum_for_finite_check(self._state.device)
        self._row.note_gradients(self._gradients.largest_magnitude(self._state.device))
        return 0.0


def require_gradients(parameters: Iterable[nn.Parameter], place: str) -> list[Tensor]:
    """Return the gradients of those parameters that have one; a LossError if none has."""
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
