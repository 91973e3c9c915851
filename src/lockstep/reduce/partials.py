"""The partials that a worker holds during a step of several shards.

A partial is not a flat buffer but the tensors that autograd made, so that a shard costs no copy: what is added to is
added to in place, and what was added is freed. With k shards that makes as many additions as accumulating gradients.

[Note: an absent gradient] A parameter that a shard did not use counts as +0.0 there, not as nothing: on another number
of workers its place in a bucket is filled with zeros, and -0.0 + 0.0 is 0.0.
"""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

Gradients = dict[nn.Parameter, Tensor]
"""The gradients of one subtree of shards, of those parameters that any of them used."""


@final
class Partials:
    """Sums of subtrees of shards, a stack.

    Attributes:
        kept: The sums; the last is on top.
        merged: Those to which the gradients that are to come will be added, in turn.
    """

    def __init__(self) -> None:
        self.kept: list[Gradients] = []
        self.merged: list[Gradients] = []

    def push(self, gradients: Gradients, num_sums: int) -> None:
        """Put a shard's gradients on top, and then add the top to the one below, `num_sums` times.

        Args:
            gradients: Dense; written to.
            num_sums: As `lockstep.shards.Turn` says.
        """
        for _ in range(num_sums):
            gradients = add_gradients(self.kept.pop(), gradients)
        self.kept.append(gradients)

    def expect(self, num_sums: int) -> None:
        """Set apart the `num_sums` partials on top, to which gradients will be added as they arrive."""
        self.merged = [self.kept.pop() for _ in range(num_sums)]

    def have(self, parameter: nn.Parameter) -> bool:
        """Whether any partial has a gradient of this parameter."""
        return any(parameter in gradients for gradients in (*self.kept, *self.merged))

    def clear(self) -> None:
        """Let go of all."""
        self.kept, self.merged = [], []


def take_gradients(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Take the gradients away from parameters that have one; sparse ones become dense."""
    taken: Gradients = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            taken[parameter] = gradient.to_dense() if gradient.is_sparse else gradient.detach()
    return taken


@torch.no_grad()
def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum of two partials, in memory of theirs. [Note: an absent gradient]."""
    both = [parameter for parameter in left if parameter in right]
    add_each([left[parameter] for parameter in both], [right[parameter] for parameter in both])
    alone = [gradient for parameter, gradient in left.items() if parameter not in right]
    alone += [gradient for parameter, gradient in right.items() if parameter not in left]
    add_zero(alone)
    return {**right, **left}


def add_each(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Add each of `right` to its counterpart, in place."""
    if left:
        torch._foreach_add_(list(left), list(right))


def add_zero(gradients: Sequence[Tensor]) -> None:
    """Add 0.0 to each, in place. [Note: an absent gradient]."""
    if gradients:
        torch._foreach_add_(list(gradients), 0.0)
