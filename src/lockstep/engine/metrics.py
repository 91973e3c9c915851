"""Means over a data set that count every sample once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A sum and how much it is a sum of."""

    total: float
    weight: float
    """Number of samples (or tokens, or whatever the metric counts) in it."""

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        return self.total / self.weight if self.weight else float("nan")


def add_means(means: Iterable[Mean]) -> Mean:
    """Add sums and weights, in the order given."""
    total = weight = 0.0
    for mean in means:
        total += mean.total
        weight += mean.weight
    return Mean(total=total, weight=weight)


def has_classes(output: object, target: object) -> bool:
    """Return whether `accuracy` can be asked: whole-number targets, and a dimension of scores for the classes."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return False
    return target.dtype != torch.bool and _class_dim(output, target) is not None


def accuracy(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Count the predictions that are right.

    Args:
        output: Scores, [N, C, ...] as `torch.nn.functional.cross_entropy` takes them, or [N, ..., C].
        target: Class numbers, [N, ...].

    Returns:
        How many are right, and of how many.

    Raises:
        ValueError: The shapes do not go together, or in two ways.
    """
    dim = _class_dim(output, target)
    if dim is None:
        raise ValueError(
            f"Scores of shape {list(output.shape)} and targets of shape {list(target.shape)} do not go together, "
            "or in two ways; expected scores [N, C, ...] or [N, ..., C] for targets [N, ...]. (LS528)"
        )
    right = output.argmax(dim) == target
    return float(right.sum()), target.numel()


def _class_dim(output: Tensor, target: Tensor) -> int | None:
    if output.ndim != target.ndim + 1:
        return None
    fitting = {dim for dim in (1, output.ndim - 1) if output.shape[:dim] + output.shape[dim + 1 :] == target.shape}
    # Both fit when, say, a text is as long as its vocabulary is large: better no answer than a wrong one.
    return fitting.pop() if len(fitting) == 1 else None
