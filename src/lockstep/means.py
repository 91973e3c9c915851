"""Means that are computed in parts, by shards or ranks: a sum and how much it is a sum of.

[Note: means of parts] The mean over a batch is that of its parts' means, each weighted by what it was divided by: of
most losses the number of samples. `cross_entropy` and `nll_loss` divide by the class weights of the targets that are
not ignored, and each part's mean needs that weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from lockstep.comm import calls_for, current_world
from lockstep.errors import LossError
from lockstep.torch_private.groups import device_types

_IN_SHARD: Final = ContextVar("whether a trainer's loss function runs", default=False)
IS_OVER_RANKS: Final = ContextVar("whether the loss of the next backward is of mean_over_ranks", default=False)

WEIGHTED_BY_TARGET: Mapping[Callable[..., Any], type[nn.Module]] = MappingProxyType(
    {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}
)
"""Losses whose mean is weighted by class weights and leaves out `ignore_index`: as a function, and as a module."""


class Mean(NamedTuple):
    """A sum and how much it is a sum of: what loss functions and metrics return, and what `Trainer.evaluate` gives.

        def loss(model, batch):
            total = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
            return ls.Mean(total, (batch[1] != -100).sum())

        def metric(model, batch):
            right = model(batch[0]).argmax(1) == batch[1]
            return ls.Mean(right.sum(), len(right))

    The mean over a batch is the sum of its parts' totals, divided by the sum of their weights.

    Args:
        total: The sum; of a loss a scalar tensor that depends on the model's parameters.
        weight: Samples, tokens, or the sum of class weights; zero or more.
    """

    total: Tensor | float
    weight: Tensor | float

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        return float(self.total) / float(self.weight) if self.weight else float("nan")


def mean_over_ranks(total: Tensor, count: Tensor | float, group: ProcessGroup | None = None) -> Tensor:
    """Return the loss of this rank for which DistributedDataParallel gives the gradient of the mean over all ranks.

        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")  # 0 where a target is ignored
        ls.mean_over_ranks(losses.sum(), (targets != -100).sum()).backward()

    The wrapper averages the gradients of ranks. The mean of each rank's own mean is not the mean over all tokens where
    ranks have other numbers of them: a rank with few counts as much as one with many. So this is the total, times the
    number of ranks, divided by the count of all ranks. The mean of what ranks get is the loss of the whole batch.

    Every rank of the group must call it, also one whose count is 0.

    Args:
        total: The sum of the losses of this rank, a scalar.
        count: Of how many samples or tokens. Where gradients are accumulated over several backwards: of all of them, so
            that each has the same divisor.
        group: The group of the wrapper; None for the default group. Without one this is `total / count`.

    Raises:
        LossError: The count of all ranks is 0.
        ValueError: On any rank the total is no floating-point scalar, or the count is below zero or not finite.
    """
    if _IN_SHARD.get():
        raise LossError(
            "mean_over_ranks was called in the loss function of a Trainer, which computes the mean over all shards "
            "itself. Return ls.Mean(total, count). (LS507)"
        )
    world, problem = current_world(group), _problem_of_total(total)
    try:
        number = float(count.detach() if isinstance(count, Tensor) else count)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        number, problem = math.nan, problem or f"The count is no number ({error})"
    if not (number >= 0 and math.isfinite(number)):
        problem = problem or f"The count is {number:g}, which is below zero or not finite"
    # A rank alone must not raise before the call, for which the others wait.
    counts = torch.tensor([number, bool(problem)], dtype=torch.float64, device="cpu")
    if world.group is not None:
        devices = device_types(world.group)
        if not any(device.type == "cpu" for device in devices):
            counts = counts.to(total.device if isinstance(total, Tensor) else devices[0])
        with calls_for("mean_over_ranks"):
            dist.all_reduce(counts, group=world.group)
    all_of_them, num_bad = map(float, counts)
    if num_bad:
        others = (
            f"{num_bad:g} of {world.world_size} ranks have given mean_over_ranks no total or count; here they are good"
        )
        raise ValueError(f"{problem or others}. The total is the sum of losses, the count of how many. (LS507)")
    if not all_of_them > 0:
        raise LossError(f"The count of all ranks is {all_of_them:g}, expected more than zero. (LS507)")
    IS_OVER_RANKS.set(True)
    return total * (world.world_size / all_of_them)


def _problem_of_total(total: Any) -> str:
    if not isinstance(total, Tensor):
        return f"The total is a {type(total).__name__}, expected a tensor of one number"
    if total.numel() != 1:
        return f"The total has shape {list(total.shape)}, expected one number"
    return "" if total.is_floating_point() else f"The total is of {total.dtype}, expected floating-point numbers"


@contextmanager
def in_shard() -> Iterator[None]:
    """Let `mean_over_ranks` raise an error within: in a loss function that a trainer calls."""
    token = _IN_SHARD.set(True)
    try:
        yield
    finally:
        _IN_SHARD.reset(token)


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
