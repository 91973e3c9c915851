"""Notes gradients at the least cost, where all that is needed is which ones came.

[Note: a hook that is switched] Of what a hook costs, a Python function is more than half, and a model may have hundreds
of parameters. The bucket with the status is sent at the end of a backward, whatever arrives before. So the parameters
of its small gradients share one hook, a `functools.partial`: it calls a Python function until the gradients are known
to be plain ([Note: plain arrivals] in `lockstep.reduce.backward_watch`), then the method `append` of a list, which is
C code, and the function again when the backward is over, also by an exception.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, final

from torch import nn

from lockstep.reduce.slot import Slot
from lockstep.torch_private.compiler import keep_compiler_out

_IS_SMALL: Final = attrgetter("is_small")


@final
class PlainArrivals:
    """The small gradients of the bucket that is sent at the end of each backward."""

    def __init__(self, slots: Sequence[Slot], deliver: "Callable[[Slot, nn.Parameter], None]") -> None:
        self._slots = {id(slot.parameter): slot for slot in slots}
        self._arrived: list[nn.Parameter] = []
        self.hook: Any = partial(_deliver_to_slot, deliver, self._slots)
        # Held here, as the hook may be running when it is switched.
        self._as_function = (self.hook.func, self.hook.args, self.hook.keywords, None)
        self._as_list: tuple[Any, ...] = (self._arrived.append, (), {}, None)

    def has(self, slot: object) -> bool:
        return isinstance(slot, Slot) and self._slots.get(id(slot.parameter)) is slot

    def begin(self) -> None:
        if all(map(_IS_SMALL, self._slots.values())):  # not if one is shared with another wrapper by now
            self.hook.__setstate__(self._as_list)

    def take_in(self) -> None:
        """Mark the places of what was noted. A gradient may have come twice, as in a reentrant checkpoint."""
        for parameter in self._arrived:
            self._slots[id(parameter)].has_arrived = True
        self._arrived.clear()

    def end(self) -> None:
        self.hook.__setstate__(self._as_function)
        self._arrived.clear()


@keep_compiler_out
def _deliver_to_slot(
    deliver: "Callable[[Slot, nn.Parameter], None]", slots: Mapping[int, Slot], parameter: nn.Parameter
) -> None:
    deliver(slots[id(parameter)], parameter)
