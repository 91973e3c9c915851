"""Letting autograd add a shard's gradients to a partial. [Note: lent partials] in `lockstep.reduce.partials`.

[Note: what may be lent] A partial may be what `.grad` holds during a backward if that gives the sums of the tree, and
if nobody sees it who expects the gradient of one shard. `may_be_lent` asks for both:

- A backward runs another one inside, as a reentrant checkpoint does: parameters may get their gradients in several
  additions. In the first step nothing is lent; whether any worker had such backwards in any step decides for all that
  follow. ([Note: a backward inside a backward])
- A loss function runs a backward of its own before it returns: its gradients wait in `.grad` for those of the loss.
- A sparse gradient whose indices repeat is added in several additions.
- A hook of the user's, run after accumulation, is to see one shard's gradient.

[Note: a backward inside a backward] Autograd numbers the graph tasks of a process. If the number after a backward is
not the next one, then something in it ran a backward of its own. All workers are told; the step in which that is first
seen, if it is not the first, fails on all of them alike, whether anything was lent there or not.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from operator import attrgetter, is_not
from typing import final

import torch
from torch import Tensor, nn

from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.partials import Gradients, Merge, add_gradients, add_zero, separate, take_gradients

_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - torch has no public name for it
_GRADIENT = attrgetter("grad")
_VERSION = attrgetter("_version")
_NO_TASK = -1


def may_be_lent(
    partial: AbstractSet[nn.Parameter],
    *,
    adds_once: bool,
    is_waiting: bool,
    sparse: AbstractSet[nn.Parameter],
    hooked: AbstractSet[nn.Parameter],
) -> AbstractSet[nn.Parameter]:
    """Return the parameters of a partial that autograd may add to. [Note: what may be lent].

    Args:
        partial: The parameters that it has gradients of.
        adds_once: Whether backwards are known to run no others inside.
        is_waiting: Whether gradients wait in `.grad` before the backward.
        sparse: Parameters that have had a sparse gradient.
        hooked: Parameters whose gradients others look at.
    """
    if not adds_once or is_waiting:
        return set()
    return partial - (sparse | hooked)


@final
class Lender:
    """Lends partials to the backwards of shards, if that gives the sums of the tree.

    Args:
        trained: The parameters that are trained.

    Attributes:
        hooked: Parameters whose gradients others look at.
        ran_inner: Whether a backward of this step has run another inside.
    """

    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        self._parameters = [each.parameter for each in trained]
        self.hooked: set[nn.Parameter] = set()
        self.ran_inner = False
        self._adds_once = False
        self._sparse = {each.parameter for each in trained if each.spec.is_sparse}
        self._task = _NO_TASK
        self._is_waiting = False
        self._lent: Gradients | None = None
        self._rest: Gradients = {}
        self._versions: list[int] = []
        self._probe = _Probe()

    def begin_step(self) -> None:
        """Forget a step that may have ended in the middle of a backward."""
        self.ran_inner = False
        self._task = _NO_TASK
        self._lent, self._rest, self._versions = None, {}, []

    def trust(self, *, adds_once: bool) -> None:
        """Take in what all workers' backwards have shown: whether they run no others inside."""
        self._adds_once = adds_once

    def watch(self, loss: Tensor) -> None:
        """See what the backward from `loss` does."""
        loss.register_hook(self._note_task)
        self._is_waiting = any(map(is_not, map(_GRADIENT, self._parameters), repeat(None)))
        if self._is_waiting:
            waiting = {each: each.grad for each in self._parameters if each.grad is not None}
            separate(waiting)  # they are added to in place now
            for parameter, gradient in waiting.items():
                parameter.grad = gradient

    def lend(self, partial: Gradients) -> Merge | None:
        """Let `.grad` be what the gradients to come are to be added to, if anything may be lent.

        Returns:
            What is left to be added, where the gradients go to buckets; None if nothing was lent.
        """
        chosen = may_be_lent(
            partial.keys(),
            adds_once=self._adds_once,
            is_waiting=self._is_waiting,
            sparse=self._sparse,
            hooked=self.hooked,
        )
        if not chosen:
            return None
        self._rest = {parameter: partial.pop(parameter) for parameter in partial.keys() - chosen}
        self._lent = partial
        for parameter, gradient in partial.items():
            parameter.grad = gradient
        self._versions = list(map(_VERSION, partial.values()))
        return Merge(gradients=self._rest, lent=chosen)

    def take(self) -> tuple[Gradients, int]:
        """Return the gradients of a shard whose backward is over, and to how many partials they were added."""
        self._learn()
        lent, rest = self._lent, self._rest
        self._lent, self._rest = None, {}
        if lent is None:
            return take_gradients(self._parameters, self._sparse), 0
        versions = zip(lent.values(), map(_VERSION, lent.values()), self._versions, strict=True)
        untouched = [gradient for gradient, version, before in versions if version == before]
        with torch.no_grad():
            add_zero(untouched)
        found = take_gradients(self._parameters, self._sparse)
        summed = {parameter: found.pop(parameter, gradient) for parameter, gradient in lent.items()}
        return {**summed, **add_gradients(rest, found)}, 1

    def forget(self) -> None:
        """End a shard whose gradients have gone to buckets."""
        self._lent, self._rest = None, {}
        self._learn()

    def _learn(self) -> None:
        """See whether a backward that is over ran others inside."""
        task, self._task = self._task, _NO_TASK
        if task != _NO_TASK and not self.ran_inner and self._probe.next_task() != task + 1:
            self.ran_inner = True

    def _note_task(self, _gradient: Tensor) -> None:
        self._task = _current_task()


@final
class _Probe:
    """Finds out the number of the next graph task, by a task of its own."""

    def __init__(self) -> None:
        self._found = 0
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True, device="cpu")
            self._output = self._leaf * 1.0
        self._output.register_hook(self._note)

    def next_task(self) -> int:
        """Return the number of the next graph task, using it up."""
        torch.autograd.grad(self._output, self._leaf, retain_graph=True)
        return self._found

    def _note(self, _gradient: Tensor) -> None:
        self._found = _current_task()
