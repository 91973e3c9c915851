"""What a mean is a mean of: the divisors of torch's losses, for a loss that is computed in parts.

[Note: means of parts] The mean over a batch is that of its parts' means, each weighted by what it was divided by: of
most losses the number of samples. `cross_entropy` and `nll_loss` divide by the class weights of the targets that are
not ignored, and each part's mean needs that weight.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

WEIGHTED_BY_TARGET: Mapping[Callable[..., Any], type[nn.Module]] = MappingProxyType(
    {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}
)
"""Losses whose mean is weighted by class weights and leaves out `ignore_index`: as a function, and as a module."""


def is_weighted_by_target(criterion: Any) -> bool:
    """Whether a criterion is a mean of that kind, or derived from one."""
    return isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.reduction == "mean"


def has_own_forward(criterion: nn.Module) -> bool:
    """Whether a criterion of that kind computes something of its own, of which the divisor is unknown."""
    known = [each.forward for each in WEIGHTED_BY_TARGET.values()]
    return "forward" in vars(criterion) or type(criterion).forward not in known


def has_class_numbers(target: Any) -> bool:
    """Whether targets are class numbers; of class probabilities the mean is over samples."""
    return isinstance(target, Tensor) and not target.is_floating_point()


def divisor_of(criterion: Any, target: Tensor) -> Tensor:
    """Return what a criterion of that kind divides by: class numbers that are not ignored, or their class weights."""
    counts: Tensor = target != criterion.ignore_index
    if criterion.weight is None:
        return counts.sum()
    weights: Tensor = criterion.weight[target.masked_fill(~counts, 0)] * counts
    return weights.sum()
