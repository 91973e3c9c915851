"""The values of the parameters, as numbers that must be the same on all ranks.

To read all parameters takes as long as a part of an update. So it is done only where there is a reason:

    in the first backwards after wrapping, then in every 64th     all parameters
    something but an optimizer has written (version counters)     all parameters
    after train() or eval(), where averaged weights come and go   all parameters
    else                                                          a part of two parameters, others each time

The part is for what no counter shows: `parameter.data.copy_(...)`, and an optimizer whose state differs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from lockstep.reduce.tensor_bits import glance_at_memory, sum_of_bits
from lockstep.torch_private.modules import version_of

_NUM_FIRST = 4
_NUM_BETWEEN = 64
_WINDOW = 2
_WINDOW_ELEMENTS = 1 << 15


@final
class ReplicaValues:
    def __init__(self, list_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]], *, may_read: bool) -> None:
        self._list_parameters = list_parameters
        self._may_read = may_read
        self._num_asked = 0
        self.look()

    def look(self) -> None:
        self._named = [(name, each) for name, each in self._list_parameters() if type(each.detach()) is Tensor]
        self._parameters = [each for _, each in self._named]
        self._num_writes = self._count_writes()
        self._is_due = True

    def note_update(self) -> None:
        """Note that an optimizer has written to the parameters (local)."""
        self._num_writes = self._count_writes()

    def expect_writes(self) -> None:
        """Read all parameters next time (local)."""
        self._is_due = True

    def was_written(self) -> bool:
        """Return whether something but the optimizers has written to the parameters since the last update."""
        return self._num_writes != self._count_writes()

    def number(self) -> int:
        """Return a number for the values, as far as they are looked at this time (local)."""
        asked, self._num_asked = self._num_asked, self._num_asked + 1
        before, self._num_writes = self._num_writes, self._count_writes()
        is_due = self._is_due or asked < _NUM_FIRST or asked % _NUM_BETWEEN == 0
        self._is_due = False
        if self._num_writes != before or (is_due and self._may_read):
            return hash(tuple(map(glance_at_memory, self._parameters)))
        return self._number_of_window() if self._may_read and self._parameters else 0

    def describe(self) -> Mapping[str, tuple[int, float]]:
        """Return the sum of each parameter's bits and of its numbers, by name (local)."""
        return {name: (int(sum_of_bits([each])), float(each.detach().sum())) for name, each in self._named}

    def _number_of_window(self) -> int:
        numbers = []
        for place in range(self._num_asked * _WINDOW, self._num_asked * _WINDOW + min(_WINDOW, len(self._parameters))):
            parameter = self._parameters[place % len(self._parameters)]
            numbers.append(_glance_at_rows(parameter, place // len(self._parameters)))
        return hash(tuple(numbers))

    def _count_writes(self) -> int:
        return sum(map(version_of, self._parameters))


def _glance_at_rows(tensor: Tensor, turn: int) -> int:
    """Return a number for some rows of a tensor, others in each turn."""
    if tensor.numel() <= _WINDOW_ELEMENTS or tensor.dim() == 0:
        return glance_at_memory(tensor)
    num_rows = max(1, _WINDOW_ELEMENTS * tensor.size(0) // tensor.numel())
    first = turn * num_rows % tensor.size(0)
    return glance_at_memory(torch.Tensor.narrow(tensor.detach(), 0, first, min(num_rows, tensor.size(0) - first)))
