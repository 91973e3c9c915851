"""The training forwards of one rank: how many no backward has reached, where the last one was, and in which mode."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from torch import Tensor, nn

from lockstep.processes.user_line import NO_LINE, CodeLine, user_line


@final
class TrainingForwards:
    """Counts forwards whose backwards are to be reduced."""

    def __init__(self) -> None:
        self.num_unused = 0
        self.is_training = True
        self.line: CodeLine = NO_LINE
        self._counts = False
        self._num_reached = 0

    def begin(self, *, counts: bool) -> None:
        """Note that a forward begins; `counts` whether it is one whose backward is to be reduced (local)."""
        self.line = user_line()
        self._counts = counts
        self.num_unused += counts

    def end(self, module: nn.Module, outputs: Sequence[Tensor]) -> Callable[[], None] | None:
        """Note that a forward has ended; return what to call when a backward reaches it, None if none can (local)."""
        counts, self._counts = self._counts, False
        if not any(output.grad_fn is not None for output in outputs):
            self.num_unused -= counts
            return None
        self.is_training = module.training
        return partial(self._note_reached, counts=counts)

    def end_backward(self) -> int:
        """Note that a backward has ended, which is reduced; return how many forwards it and those before reached."""
        if self._num_reached == 0 and self.num_unused > 0:
            self.num_unused -= 1  # tensors are not found in what it has returned
        num_reached, self._num_reached = self._num_reached, 0
        return num_reached

    def forget(self) -> None:
        """Expect no backward of the forwards so far (local)."""
        self.num_unused = 0

    def _note_reached(self, *, counts: bool) -> None:
        self.num_unused -= counts
        self._num_reached += 1
