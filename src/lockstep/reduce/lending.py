"""Letting autograd add a shard's gradients to a partial. [Note: lent partials] in `lockstep.reduce.partials`.

[Note: a backward inside a backward] Autograd numbers the graph tasks of a process. If the number after a backward is
not the next one, then something in it ran a backward of its own, and parameters may have got their gradients in several
additions. In the first step nothing is lent; whether it had such backwards decides for all that follow. A model that
begins with them later is refused.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.partials import Gradients, Merge, add_gradients, add_zero, take_gradients

_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - torch has no public name for it


@final
class Lender:
    """Lends partials to the backwards of shards, if that gives the sums of the tree.

    Args:
        trained: The parameters that are trained.

    Attributes:
        is_in_order: False once a backward has run another inside, which none of the first step did.
    """

    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        self._parameters = [each.parameter for each in trained]
        self.is_in_order = True
        self._is_learning = True
        self._can_lend = True
        self._sparse = {each.parameter for each in trained if each.spec.is_sparse}
        self._task = 0
        self._lent: Gradients | None = None
        self._rest: Gradients = {}
        self._versions: list[int] = []
        self._probe = _Probe()

    @property
    def lends(self) -> bool:
        """Whether partials may be lent."""
        return self._can_lend and not self._is_learning

    def end_step(self) -> None:
        """Note that a step is over."""
        self._is_learning = False

    def watch(self, loss: Tensor) -> None:
        """See what the backward from `loss` does."""
        loss.register_hook(self._note_task)

    def lend(self, partial: Gradients) -> Merge:
        """Let `.grad` be what the gradients to come are to be added to.

        Returns:
            What is left to be added, where the gradients go to buckets.
        """
        # Adding a sparse gradient whose indices repeat is several additions.
        self._rest = {parameter: partial.pop(parameter) for parameter in self._sparse & partial.keys()}
        self._lent = partial
        for parameter, gradient in partial.items():
            parameter.grad = gradient
        self._versions = [gradient._version for gradient in partial.values()]  # noqa: SLF001 - no public name
        return Merge(gradients=self._rest, lent=frozenset(partial))

    def take(self) -> tuple[Gradients, int]:
        """Return the gradients of a shard whose backward is over, and to how many partials they were added."""
        self._learn()
        lent, self._lent = self._lent, None
        if lent is None:
            return take_gradients(self._parameters), 0
        versions = zip(lent.values(), self._versions, strict=True)
        untouched = [gradient for gradient, version in versions if gradient._version == version]  # noqa: SLF001
        with torch.no_grad():
            add_zero(untouched)
        found = take_gradients(self._parameters)
        summed = {parameter: found.pop(parameter, gradient) for parameter, gradient in lent.items()}
        return {**summed, **add_gradients(self._rest, found)}, 1

    def forget(self) -> None:
        """End a shard whose gradients have gone to buckets."""
        self._lent = None
        self._learn()

    def _learn(self) -> None:
        """Look at a backward that is over: whether it gave sparse gradients, or ran others inside."""
        task, self._task = self._task, 0
        if self._is_learning:
            found = (parameter for parameter in self._parameters if parameter.grad is not None)
            self._sparse.update(parameter for parameter in found if parameter.grad.is_sparse)  # type: ignore[union-attr]
        if not task or not self._can_lend or self._probe.next_task() == task + 1:
            return
        if self._is_learning:
            self._can_lend = False
        else:
            self.is_in_order = False

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
