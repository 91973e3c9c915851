"""What a loss function may return.

[Note: a shard that has nothing to learn from] In a plain loop samples of weight zero are in the batch like others: the
parameters that they use have a gradient, of zeros if nothing else uses them, and an optimizer with weight decay or
momentum updates these. The shard's own mean is often one of nothing, 0 / 0, whose backward gives NaN. So it is replaced
by a sum of zeros over the same parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from lockstep.data import Slice
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.step_values import ShardValues, check_values
from lockstep.errors import LossError
from lockstep.torch_private.autograd import tensor_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLoss:
    """What a loss function has returned for a slice."""

    loss: Tensor
    """The mean loss, a scalar with a graph."""
    weight: float | Tensor
    values: ShardValues
    """What else it has returned, by name."""


def read_loss(result: Any, part: Slice) -> SliceLoss:
    """Return the mean loss of a slice, and its weight: of samples, unless the loss function returns another.

    A weight that is a tensor on an asynchronous device stays there.
    """
    others: Mapping[Any, Any] = {}
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise LossError(
                f"The loss function returned a dictionary of {', '.join(map(str, result)) or 'nothing'}, expected one "
                'with the mean loss of the slice, or a pair of it and its weight, as "loss". (LS507)'
            )
        others = {name: value for name, value in result.items() if name != "loss"}
        result = result["loss"]
    loss, given = result, part.num_samples
    if isinstance(result, tuple):
        if len(result) != 2:  # noqa: PLR2004 - loss and weight
            raise LossError(
                f"The loss function returned a tuple of {len(result)}, expected the mean loss of a slice, or a pair of "
                "it and its weight. (LS507)"
            )
        loss, given = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError(
            f"The loss function returned {_describe(loss)}, expected a tensor of one number that depends on the "
            "model's parameters. (LS507)"
        )
    weight = _read_weight(given, part.shard)
    return SliceLoss(
        loss=loss.reshape(()) if loss.ndim else loss,
        weight=weight,
        values=check_values(others, weight) if others else {},
    )


def begin_backward_at(loss: Tensor) -> Tensor:
    """Return a tensor with the value of a loss at which a backward begins, and which no hook was put on yet."""
    return loss.view_as(loss) if loss.grad_fn is None or tensor_hooks(loss) else loss


def gradient_of_loss(loss: Tensor, weight: float | Tensor, num_samples: int) -> Tensor:
    """Return the gradient with which the backward of a scalar loss begins: weight / samples of the global batch.

    It is at most 1 where weights count samples, so that half precision does not overflow. The gradients have the bits
    that `loss * (weight / num_samples)` gives them, in less time.
    """
    if not isinstance(weight, Tensor):
        return torch.full_like(loss, weight / num_samples, requires_grad=False)
    return (weight.double() / num_samples).to(torch.promote_types(loss.dtype, torch.float32)).to(loss.dtype)


def zero_over_parameters(loss: Tensor) -> Tensor | None:
    """Return a zero whose backward gives zeros to the parameters that a loss depends on, if it has some (local).

    [Note: a shard that has nothing to learn from].
    """
    zeros = [leaf.sum() * 0.0 for leaf in _find_leaves(loss)]
    if not zeros:
        return None
    first, *others = (zero.to(dtype=loss.dtype, device=loss.device) for zero in zeros)
    return sum(others, start=first)


def _read_weight(weight: Any, shard: int) -> float | Tensor:
    # Plain numbers first: to ask for a protocol takes longer than all else here.
    is_number = isinstance(weight, (int, float, SupportsFloat)) and not (
        isinstance(weight, Tensor) and weight.numel() != 1
    )
    if not is_number:
        raise LossError(
            f"The loss of shard {shard} has as its weight {_describe(weight)}, expected one number: how much the "
            "slice's mean counts, say its samples or tokens. (LS507)"
        )
    if isinstance(weight, Tensor) and is_asynchronous(weight.device):
        return weight.detach().reshape(())
    number = float(weight)
    if number < 0 or not math.isfinite(number):
        raise LossError(f"The loss of shard {shard} has weight {number}, expected zero or more, and finite. (LS507)")
    return number


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def _find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a graph that require a gradient, in the order in which they are found."""
    found: list[Tensor] = []
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
