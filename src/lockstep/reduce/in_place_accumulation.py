"""Letting autograd add a shard's gradients to a partial, in place.

[Note: accumulating in place] in `lockstep.reduce.partials` gives the reason.

[Note: what may be added to in place] A partial may be what `.grad` holds during a backward if that gives the sums of
the tree, and if no hook reads it that expects the gradient of one shard. `may_accumulate_in_place` checks both:

- A backward runs another one inside, as a reentrant checkpoint does: parameters may get their gradients in several
  additions. In the first step nothing is added in place; whether any worker had such backwards in any step decides for
  all that follow. ([Note: a backward inside a backward])
- A loss function runs a backward of its own before it returns: its gradients wait in `.grad` for those of the loss.
- A sparse gradient whose indices repeat is added in several additions.
- A hook of the user's, run after accumulation, must be given one shard's gradient.

[Note: a backward inside a backward] Autograd numbers the graph tasks of a process. If the number after a backward is
not the next one, then something in it ran a backward of its own. This is sent to all workers; the step in which that is
first found, if it is not the first, fails on all of them alike, whether anything was added in place there or not. To
look at the numbers takes as long as many additions. So once it is known that there are no such backwards, only the last
one of a step is looked at, and in the others, where gradients are added in place, a second addition shows in the
version of the sum.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from operator import attrgetter, is_not, sub
from typing import final

import torch
from torch import Tensor, nn

from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.partials import Gradients, Merge, add_gradients, add_zero, separate, take_gradients
from lockstep.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id, run_backward_of_leaf
from lockstep.torch_private.modules import version_of

_GRADIENT = attrgetter("grad")


def may_accumulate_in_place(
    partial: AbstractSet[nn.Parameter],
    *,
    adds_once: bool,
    is_waiting: bool,
    sparse: AbstractSet[nn.Parameter],
    hooked: AbstractSet[nn.Parameter],
) -> AbstractSet[nn.Parameter]:
    """Return the parameters of a partial that autograd may add to. [Note: what may be added to in place]."""
    if not adds_once or is_waiting:
        return set()
    return partial - (sparse | hooked) if sparse or hooked else partial


@final
class InPlaceAccumulation:
    """Lets the backwards of shards add to partials, where that gives the sums of the tree."""

    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        self._parameters = [each.parameter for each in trained]
        self.adds_once = False
        self.hooked: set[nn.Parameter] = set()
        self.has_nested_backward = False
        self._sparse = {each.parameter for each in trained if each.spec.is_sparse}
        self._task = NO_GRAPH_TASK
        self._is_waiting = False
        self._target: Gradients | None = None
        self._rest: Gradients = {}
        self._versions: list[int] = []
        self._task_counter = _TaskCounter()

    def begin_step(self) -> None:
        """Forget a step that may have ended in the middle of a backward."""
        self.has_nested_backward = False
        self._task = NO_GRAPH_TASK
        self._target, self._rest, self._versions = None, {}, []

    def watch(self, loss: Tensor, *, is_last: bool) -> None:
        """Watch the backward from `loss`, the last one of this worker in a step or another."""
        if is_last or not self.adds_once:
            loss.register_hook(self._note_task)
        self._is_waiting = any(map(is_not, map(_GRADIENT, self._parameters), repeat(None)))
        if self._is_waiting:
            waiting = {each: each.grad for each in self._parameters if each.grad is not None}
            separate(waiting)  # they are added to in place now
            for parameter, gradient in waiting.items():
                parameter.grad = gradient

    def offer(self, partial: Gradients) -> Merge | None:
        """Let `.grad` be the partial that the gradients to come are to be added to, as far as that may be.

        Returns what is left to be added, where the gradients go to buckets; None if nothing may be added in place.
        """
        chosen = may_accumulate_in_place(
            partial.keys(),
            adds_once=self.adds_once,
            is_waiting=self._is_waiting,
            sparse=self._sparse,
            hooked=self.hooked,
        )
        if not chosen:
            return None
        left_out = partial.keys() - chosen if len(chosen) < len(partial) else ()
        self._rest = {parameter: partial.pop(parameter) for parameter in left_out}
        self._target = partial
        for parameter, gradient in partial.items():
            parameter.grad = gradient
        self._versions = list(map(version_of, partial.values()))
        return Merge(gradients=self._rest, in_place=chosen)

    def take(self) -> tuple[Gradients, int]:
        """Return the gradients of a shard whose backward is over, and to how many partials they were added."""
        self._look_for_inner_tasks()
        target, rest = self._target, self._rest
        self._target, self._rest = None, {}
        if target is None:
            return take_gradients(self._parameters, self._sparse), 0
        num_added = list(map(sub, map(version_of, target.values()), self._versions))
        if max(num_added) > 1:
            self.has_nested_backward = True
        if not all(num_added):
            add_zero([gradient for gradient, number in zip(target.values(), num_added, strict=True) if not number])
        found = take_gradients(self._parameters, self._sparse)
        summed = {parameter: found.pop(parameter, gradient) for parameter, gradient in target.items()}
        return ({**summed, **add_gradients(rest, found)} if rest or found else summed), 1

    def end_in_buckets(self) -> None:
        """End a shard whose gradients have gone to buckets."""
        self._target, self._rest = None, {}
        self._look_for_inner_tasks()

    def _look_for_inner_tasks(self) -> None:
        """Find out whether a backward that is over ran others inside."""
        task, self._task = self._task, NO_GRAPH_TASK
        if task != NO_GRAPH_TASK and not self.has_nested_backward and self._task_counter.next_task() != task + 1:
            self.has_nested_backward = True

    def _note_task(self, _gradient: Tensor) -> None:
        self._task = current_graph_task_id()


@final
class _TaskCounter:
    """Finds out the number of the next graph task, by a task of its own."""

    def __init__(self) -> None:
        self._found = 0
        self._leaf = torch.zeros((), requires_grad=True, device="cpu")
        self._leaf.register_hook(self._note)
        self._gradient = torch.zeros((), device="cpu")

    def next_task(self) -> int:
        """Return the number of the next graph task, which this call uses."""
        run_backward_of_leaf(self._leaf, self._gradient)
        return self._found

    def _note(self, _gradient: Tensor) -> None:
        self._found = current_graph_task_id()
