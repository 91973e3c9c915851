"""The values of the parameters, as numbers that must be the same on all ranks.

[Note: what lasts] Weights may be elsewhere while a backward runs, on each rank in another place, and be put back before
the optimizer steps: sharpness-aware minimization, noise on weights, averages swapped in for an evaluation. So what is
compared is what an optimizer's step has left. The backward after that sends it; what was written since is seen a step
later. Only where nobody has an optimizer of the parameters are they read in the backward.

To read all parameters takes as long as a part of an update. So it is done only where there is a reason:

    after the first steps after wrapping, then every 64th         all parameters
    something but an optimizer has written (version counters)     all parameters
    after train() or eval(), where averaged weights come and go   all parameters
    else                                                          a part of two parameters, others each time

The part is for what no counter shows: `parameter.data.copy_(...)`, and an optimizer whose state differs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from lockstep.reduce.tensor_bits import glance_at_bits, sum_of_bits
from lockstep.torch_private.modules import version_of

_NUM_FIRST = 4
_NUM_BETWEEN = 64
_WINDOW = 2
_WINDOW_ELEMENTS = 1 << 15
SWITCH = "If that is meant, wrap with compare=False."
"""What ends an alarm."""
Values = Mapping[str, tuple[int, float]]
"""The sum of each parameter's bits, which decides, and that of its numbers, which is shown, by name."""


@final
class ReplicaValues:
    """`awaits_step` returns whether an optimizer that has not stepped yet holds the parameters; it takes long."""

    def __init__(
        self,
        list_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        awaits_step: Callable[[], bool],
        *,
        may_read: bool,
    ) -> None:
        self._list_parameters = list_parameters
        self._awaits_step = awaits_step
        self._may_read = may_read
        self._num_asked = self._num_read = 0
        self._has_steps = self._is_read = False
        self._waits: bool | None = None
        self._number = 0
        self._wants_all = False
        self._all: Values | None = None
        self._places: Sequence[tuple[nn.Parameter, int | None]] = ()
        self._seen = 0
        self.look()

    def look(self) -> None:
        self._named = [(name, each) for name, each in self._list_parameters() if type(each.detach()) is Tensor]
        self._parameters = [each for _, each in self._named]
        self._num_writes = self._count_writes()
        self._is_due = True

    def begin_update(self) -> None:
        """Note that an optimizer is about to write to the parameters (local)."""
        self._is_due = self._is_due or self.was_written()

    def end_update(self) -> None:
        """Read what an optimizer's step has left, if it is the first one since a reduction (local)."""
        self._has_steps = True
        self._num_writes = self._count_writes()
        if not self._is_read:
            self._is_read = True
            self._read(was_written=self._is_due)

    def expect_writes(self) -> None:
        """Read all parameters next time (local)."""
        self._is_due = True

    def was_written(self) -> bool:
        """Return whether something but the optimizers has written to the parameters since the last update."""
        return self._num_writes != self._count_writes()

    def number(self) -> int:
        """Return a number for the values, as far as they were looked at this time (local)."""
        self._num_asked += 1
        self._is_read = False
        if self._has_steps:
            return self._number
        if self._waits is None:
            self._waits = self._awaits_step()
        elif self._num_asked > _NUM_BETWEEN:
            self._waits = False  # it holds them and never steps
        if self._waits is not False:
            return 0
        before, self._num_writes = self._num_writes, self._count_writes()
        self._read(was_written=self._num_writes != before)
        return self._number

    def describe(self) -> Values:
        """Return the values by name; nothing where they are not what lasts (local). See [Note: what lasts]."""
        if self._all is not None:
            return self._all
        if (self._has_steps and self._has_moved()) or (not self._has_steps and self._waits is not False):
            return {}
        return self._sum_up()

    def compare(self, found: Sequence[Values]) -> None:
        """Read all of what the next step leaves, if a rank did not know its values (local; `found` is of all ranks)."""
        self._wants_all = not all(found)

    def _read(self, *, was_written: bool) -> None:
        turn, self._num_read = self._num_read, self._num_read + 1
        is_due = self._is_due or turn < _NUM_FIRST or turn % _NUM_BETWEEN == 0
        self._is_due = False
        self._all = self._sum_up() if self._wants_all else None
        self._wants_all = False
        places: Iterable[tuple[nn.Parameter, int | None]] = ()
        if was_written or (is_due and self._may_read):
            places = ((each, None) for each in self._parameters)
        elif self._may_read and self._parameters:
            places = self._window(turn)
        self._places = list(places)
        self._seen = self._glance()
        sums = () if self._all is None else self._all.values()
        self._number = hash((self._seen, *(bits for bits, _ in sums)))

    def _window(self, turn: int) -> Iterable[tuple[nn.Parameter, int]]:
        number = len(self._parameters)
        for place in range(turn * _WINDOW, turn * _WINDOW + min(_WINDOW, number)):
            yield self._parameters[place % number], place // number

    def _has_moved(self) -> bool:
        return self.was_written() or self._glance() != self._seen

    def _glance(self) -> int:
        return glance_at_bits(*(_some_rows(parameter, part) for parameter, part in self._places))

    def _sum_up(self) -> Values:
        return {name: (int(sum_of_bits([each])), float(each.detach().sum())) for name, each in self._named}

    def _count_writes(self) -> int:
        return sum(map(version_of, self._parameters))


def _some_rows(tensor: Tensor, part: int | None) -> Tensor:
    """Return a tensor, or some of its rows, others for each part."""
    if part is None or tensor.numel() <= _WINDOW_ELEMENTS or tensor.dim() == 0:
        return tensor
    num_rows = max(1, _WINDOW_ELEMENTS * tensor.size(0) // tensor.numel())
    first = part * num_rows % tensor.size(0)
    return torch.Tensor.narrow(tensor.detach(), 0, first, min(num_rows, tensor.size(0) - first))
