"""The reduced gradients: whether there are any, and whether they are finite.

Asked closely only where `lockstep.reduce.tensor_bits` has found a sum that is not finite, or their norm is not.
"""

import math
from collections.abc import Iterable

from torch import Tensor, nn

from lockstep.engine.run_state import RunState
from lockstep.errors import LossError


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
