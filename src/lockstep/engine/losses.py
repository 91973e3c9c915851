"""What a loss function may return."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsFloat

from torch import Tensor

from lockstep.data import Slice
from lockstep.errors import LossError


@contextmanager
def explained_second_backward() -> Iterator[None]:
    """Say what to do where the loss function has called `backward` by itself.

    Raises:
        LossError: It has. torch's own advice, retain_graph=True, would add the gradient twice.
    """
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise LossError(
            "The loss that the loss function returned has been through backward already. Return the loss and leave "
            "backward, zero_grad and optimizer.step to Trainer.step; with retain_graph=True the gradient would count "
            "twice."
        ) from error


def read_loss(result: Any, part: Slice) -> tuple[Tensor, float]:
    """Return the mean loss of a slice, and its weight: of samples, unless the loss says otherwise.

    Raises:
        LossError: It is neither a mean nor a pair of a mean and a weight.
    """
    loss, weight = result, part.num_samples
    if isinstance(result, tuple):
        if len(result) != 2:  # noqa: PLR2004 - loss and weight
            raise LossError(
                f"The loss function returned a tuple of {len(result)}, expected the mean loss of a slice, or a pair of "
                "it and its weight."
            )
        loss, weight = result
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError(
            f"The loss function returned {_describe(loss)}, expected a tensor of one number that depends on the "
            "model's parameters."
        )
    return loss.reshape(()), _read_weight(weight, part.shard)


def _read_weight(weight: Any, shard: int) -> float:
    is_number = isinstance(weight, SupportsFloat) and not (isinstance(weight, Tensor) and weight.numel() != 1)
    if not is_number:
        raise LossError(
            f"The loss of shard {shard} has as its weight {_describe(weight)}, expected one number: how much the "
            "slice's mean counts, say its samples or tokens."
        )
    number = float(weight)
    if number < 0 or not math.isfinite(number):
        raise LossError(f"The loss of shard {shard} has weight {number}, expected zero or more, and finite.")
    return number


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
