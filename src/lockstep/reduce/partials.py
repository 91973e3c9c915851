"""The partials that a worker holds during a step of several shards.

A partial is not a flat buffer but the tensors that autograd made, so that a shard costs no copy: what is added to is
added to in place, and what was added is freed. With k shards that makes as many additions as accumulating gradients.

[Note: an absent gradient] A parameter that a shard did not use counts as +0.0 there, not as nothing: on another number
of workers its place in a bucket is filled with zeros, and -0.0 + 0.0 is 0.0.

[Note: accumulating in place] Where a shard's gradients are to be added to a partial, that is what `.grad` holds while
its backward runs: autograd adds each gradient while it is in the cache and frees it at once. Else all of them would lie
in fresh memory until the end, which takes longer than the addition. The order is that of the tree if autograd adds only
once to each parameter; `lockstep.reduce.shard_reducer` finds out whether it does.

[Note: gradients in one memory] Where two parameters are added through views, `position[None] + kind[None]`, autograd
gives both the same memory as gradient. What is done in place to one would be done to the other, and so to each twice.

[Note: memory of CUDA graphs] A model compiled with `mode="reduce-overhead"` runs as CUDA graphs, whose outputs lie in
memory that the next run of the graph overwrites. Autograd takes such an output for `.grad` without copying it. The next
shard would overwrite the partial, so all gradients are copied as soon as the compiler has made such graphs. Graphs of
`torch.cuda.make_graphed_callables` keep their outputs, which reference counts show.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn

from lockstep.torch_private.compiler import has_cuda_graphs_of_compiler
from lockstep.torch_private.modules import USUAL_STORAGE_USERS, count_storage_users, foreach_add_

Gradients = dict[nn.Parameter, Tensor]
"""The gradients of one subtree of shards, of those parameters that any of them used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    gradients: Gradients
    in_place: Collection[nn.Parameter] = ()
    """Parameters whose gradients autograd added to it as they came. [Note: accumulating in place]."""


@final
class Partials:
    """Sums of subtrees of shards: `kept`, a stack, and `merged`, to which the next gradients will be added in turn."""

    def __init__(self) -> None:
        self.kept: list[Gradients] = []
        self.merged: list[Merge] = []

    def push(self, gradients: Gradients, num_sums: int) -> None:
        """Put a shard's gradients (written to) on top, and then add the top to the one below, `num_sums` times."""
        for _ in range(num_sums):
            gradients = add_gradients(self.kept.pop(), gradients)
        self.kept.append(gradients)

    def set_aside(self, num_sums: int, first: Merge | None = None) -> None:
        """Set aside the `num_sums` partials on top, after `first`, to which gradients will be added as they arrive."""
        self.merged = [] if first is None else [first]
        self.merged += [Merge(gradients=self.kept.pop()) for _ in range(num_sums)]

    def has(self, parameter: nn.Parameter) -> bool:
        return any(parameter in gradients for gradients in self.kept) or any(
            parameter in merge.gradients or parameter in merge.in_place for merge in self.merged
        )

    def clear(self) -> None:
        self.kept, self.merged = [], []


def take_gradients(
    parameters: Iterable[nn.Parameter],
    sparse: set[nn.Parameter] | None = None,
    target: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> Gradients:
    """Take gradients, all dense, in memory of their own, without those added in place to `target`; note sparse ones."""
    taken: Gradients = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            if gradient is target.get(parameter):
                continue
            if gradient.is_sparse or gradient.requires_grad:
                if sparse is not None and gradient.is_sparse:
                    sparse.add(parameter)
                gradient = as_dense(gradient)
            taken[parameter] = gradient
    gradient = None  # it would count as a user of its memory
    if taken:
        separate(taken)
    return taken


def separate(gradients: Gradients) -> None:
    """Give each dense gradient memory of its own. [Note: gradients in one memory] and [Note: memory of CUDA graphs]."""
    dense = {parameter: gradient for parameter, gradient in gradients.items() if not gradient.is_sparse}
    copies_all = has_cuda_graphs_of_compiler()
    own_memory, *counts = count_storage_users([_tensor_alone(), *dense.values()])
    if not copies_all and max(counts, default=0) <= min(own_memory, USUAL_STORAGE_USERS):
        return
    # Counted anew, because a dispatch mode, such as torch's CUDA sanitizer, may change it.
    (own_memory,) = count_storage_users([torch.empty(1, device="cpu")])
    for (parameter, gradient), num_users in zip(dense.items(), counts, strict=True):
        if copies_all or num_users > own_memory:
            gradients[parameter] = gradient.clone()


@cache
def _tensor_alone() -> Tensor:
    return torch.empty(1, device="cpu")


def as_dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.detach().to_dense()
    return gradient.detach() if gradient.requires_grad else gradient


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum of two partials, which have no graph, in memory of theirs. [Note: an absent gradient]."""
    both = [parameter for parameter in left if parameter in right]
    add_each([left[parameter] for parameter in both], [right[parameter] for parameter in both])
    alone = [gradient for parameter, gradient in left.items() if parameter not in right]
    alone += [gradient for parameter, gradient in right.items() if parameter not in left]
    add_zero(alone)
    return {**right, **left}


def add_each(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    if left:
        foreach_add_(list(left), list(right))


def add_zero(gradients: Sequence[Tensor]) -> None:
    """Add 0.0 to each, in place. [Note: an absent gradient]."""
    if gradients:
        foreach_add_(list(gradients), 0.0)
