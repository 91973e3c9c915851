"""Which parameters have a place in the buckets of more than one reducer.

    fine = DistributedDataParallel(Sequential(backbone, head))     # while an earlier wrapper of `backbone` still lives
    a, b = DistributedDataParallel(Net(encoder)), DistributedDataParallel(Other(encoder))

[Note: shared parameters] A gradient lies in one bucket only. If two reducers took it for theirs, the first would scale
and send the memory that the second is about to read. So each of them copies it when it arrives, leaves `.grad` alone,
and writes the mean into it at the end: what torch does always. That `.grad` then gets the same mean twice is harmless.

Reducers have no references to each other, only the parameter in common. Hence the one table here. A place keeps
its parameter alive, so the identity of a parameter names it as long as it has a place.
"""

import weakref
from collections.abc import Iterable
from typing import Final

from torch import nn

from lockstep.reduce.slot import Slot

_PLACES: Final[dict[int, "weakref.WeakSet[Slot]"]] = {}
"""The places of each parameter in layouts that are in use."""


def claim(slots: Iterable[Slot]) -> None:
    """Note the places of a new layout; those of parameters that have another place are shared from now on (local)."""
    for parameter in [parameter for parameter, places in _PLACES.items() if not places]:
        del _PLACES[parameter]
    for slot in slots:
        places = _PLACES.setdefault(id(slot.parameter), weakref.WeakSet())
        places.add(slot)
        if len(places) > 1:
            for place in places:
                place.share()


def has_place(parameter: nn.Parameter) -> bool:
    """Return whether a gradient of this parameter is reduced by some reducer of this process (local)."""
    return any(place.parameter is parameter for place in _PLACES.get(id(parameter), ()))


def give_up(slots: Iterable[Slot]) -> None:
    """Forget the places of a layout that is not used any more; not during a backward (local)."""
    for slot in slots:
        places = _PLACES.get(id(slot.parameter), weakref.WeakSet())
        places.discard(slot)
        if len(places) == 1:
            for place in places:
                place.use_bucket()
