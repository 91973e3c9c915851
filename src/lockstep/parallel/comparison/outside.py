"""Parameters that are outside of every wrapper, and are trained beside a wrapped model.

    backbone = ls.DistributedDataParallel(Backbone())
    head = nn.Linear(8, 3)                                              # its gradients are those of this rank alone
    optimizer = SGD([*backbone.parameters(), *head.parameters()], 0.1)

A gradient of such a parameter is not averaged, so after the first step it is another one on each rank. That is seen in
the next backward: their values are compared like those of the wrapped model. It is a warning and not an error, for in
model parallelism ranks have parameters of their own on purpose.

The other mistake of this kind is an optimizer that holds the parameters of a copy of the model: nobody's gradient
arrives there, and the parameters that get one are in no optimizer.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ReductionError
from lockstep.parallel.comparison.optimizers import HeldParameters
from lockstep.parallel.comparison.values import SWITCH, ReplicaValues
from lockstep.processes.user_line import stacklevel_of_user, user_line
from lockstep.reduce.current_plan import has_place
from lockstep.torch_private.modules import parameter_registry

_NUM_IDLE = 3
"""After so many reductions an optimizer whose parameters never have gradients is an error."""
_NUM_FIRST = 4
_NUM_BETWEEN = 64
"""In an optimizer's first steps and then in every so many-th is looked which parameters have a wrapper: for all of them
that takes as long as a step."""
_NUM_IDLE_LOOKS = 16
"""After so many looks in vain an optimizer is not looked at any more, until it or the model has other parameters."""
_NUM_UNKNOWN = 3
"""After so many exchanges in which a rank had nothing to compare they are compared no more."""
_NUM_READ_ON_DEVICE = 4
"""So often such parameters are read on an asynchronous device, where reading them waits for it."""


@dataclass(frozen=True, slots=True)
class OutsideValue:
    """A parameter that is outside of every wrapper, as ranks compare it."""

    name: str
    shape: tuple[int, ...]
    bits: int
    """The sum of its bits."""
    total: float
    """The sum of its numbers."""


@final
class OutsideParameters:
    """The parameters outside of every wrapper that this rank's optimizers step with gradients."""

    def __init__(self, *, may_read: bool) -> None:
        self._may_read = may_read
        self._places: dict[str, weakref.ref[nn.Parameter]] = {}
        self._values = ReplicaValues(self._list_parameters, lambda: True, may_read=True)
        self._num_read = self._num_unknown = 0
        self._is_compared = True

    def note_step(self, optimizer: Optimizer, held: HeldParameters) -> None:
        """Look for such parameters in an optimizer's first steps, and now and then (local)."""
        if not self._is_compared:
            return
        turn, held.num_steps = held.num_steps, held.num_steps + 1
        if turn < _NUM_FIRST or turn % _NUM_BETWEEN == 0:
            known = set(map(id, (reference() for reference in self._places.values())))
            new = [each for each in held.others if each.grad is not None and id(each) not in known]
            new = [each for each in new if not has_place(each)]
            if new:
                places = _find_places(optimizer, new)
                first = len(self._places)
                for number, each in enumerate(new, start=first):
                    self._places[f"{number}: {places[id(each)]}"] = weakref.ref(each)
                self._values.look()
        if self._places:
            self._values.end_update()

    def number(self) -> int:
        """Return a number for their values, as far as they are looked at this time (local)."""
        if not self._places or not self._is_compared:
            return 0
        self._num_read += 1
        return self._values.number() if self._may_read or self._num_read <= _NUM_READ_ON_DEVICE else 0

    def describe(self) -> tuple[OutsideValue, ...]:
        if not self._places or not self._is_compared:
            return ()
        numbers = self._values.describe()
        alive = self._list_parameters()
        names = _describe(alive)
        return tuple(
            OutsideValue(names[place], tuple(each.shape), *numbers[place]) for place, each in alive if place in numbers
        )

    def compare(self, found: Sequence[tuple[OutsideValue, ...]]) -> None:
        """Look at what `describe` has returned on each rank, in rank order, and warn once (the same on every rank)."""
        if not self._is_compared or len(set(found)) == 1:
            return
        if not all(found):  # a rank does not know what lasts, or has none
            self._values.compare([{}])
            self._num_unknown += 1
            self._is_compared = self._num_unknown < _NUM_UNKNOWN
            return
        self._is_compared = False  # that they differ was said, or they are different things
        text = find_outside_difference(found)
        if text:
            warnings.warn(text, stacklevel=stacklevel_of_user())

    def _list_parameters(self) -> list[tuple[str, nn.Parameter]]:
        alive = [(place, reference()) for place, reference in self._places.items()]
        return [(place, each) for place, each in alive if each is not None and not has_place(each)]


def find_outside_difference(found: Sequence[tuple[OutsideValue, ...]]) -> str:
    """Return what to warn of, in words; empty where the ranks have different things (pure)."""
    first, *others = found
    for rank, values in enumerate(others, start=1):
        if [each.shape for each in values] != [each.shape for each in first]:
            continue
        odd = [(here, there) for here, there in zip(values, first, strict=True) if here.bits != there.bits]
        if not odd:
            continue
        (here, there), *more = odd
        more_text = f", and so do {len(more)} more" if more else ""
        return (
            f"A parameter that is trained and is outside of every DistributedDataParallel differs: {there.name} adds "
            f"up to {here.total!r} on rank {rank} and to {there.total!r} on rank 0{more_text}. Its gradients are not "
            "averaged over the ranks. Put the layers and losses that have such parameters into one module with the "
            "model, and wrap that; or wrap them too. If each rank is to have its own, as in model parallelism, ignore "
            'this: warnings.filterwarnings("ignore", message="A parameter that is trained"). It is given once. (LS319)'
        )
    return ""


@final
class IdleOptimizers:
    """Looks for optimizers that hold a copy of the model: their parameters never have gradients."""

    def __init__(self) -> None:
        self._num_reductions = 0
        self._num_idle = 0

    def look_at(
        self,
        optimizer: Optimizer,
        held: HeldParameters,
        trained: Mapping[str, nn.Parameter],
        owned: Collection[int],
        num_reductions: int,
    ) -> None:
        """Look at a step with parameters that are not the model's (local); `owned` are ids of its in optimizers."""
        if num_reductions == self._num_reductions or held.num_idle_looks >= _NUM_IDLE_LOOKS:
            return
        held.num_idle_looks += 1
        idle = [each for each in held.others if each.grad is None and each.requires_grad and not has_place(each)]
        if not idle:
            return
        self._num_reductions = num_reductions
        unowned = {name: each for name, each in trained.items() if each.grad is not None and id(each) not in owned}
        common = Counter(each.shape for each in idle) & Counter(each.shape for each in unowned.values())
        self._num_idle = self._num_idle + 1 if common else 0
        if self._num_idle < _NUM_IDLE:
            return
        name = next(name for name, each in unowned.items() if each.shape in common)
        raise ReductionError(
            f"The {type(optimizer).__name__} that steps at {user_line()} holds parameters that get no gradients, and "
            f"the wrapped model's parameter {name} and others of the same shapes get them and are in no optimizer that "
            f"steps: after {num_reductions} backwards they were not changed. The optimizer was made with the "
            "parameters of a copy of the model, or before layers were replaced. Make it after wrapping: "
            f"torch.optim.SGD(model.parameters(), ...) with the wrapped model. {SWITCH} (LS319)"
        )


def _find_places(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
    wanted = set(map(id, parameters))
    return {
        id(each): f"parameter {index} of group {number} of {type(optimizer).__name__}"
        for number, group in enumerate(optimizer.param_groups)
        for index, each in enumerate(group["params"])
        if id(each) in wanted
    }


def _describe(alive: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return by place what messages call each parameter: by its module, and by its place in the optimizer."""
    owners: dict[int, str] = {}
    wanted = {id(parameter) for _, parameter in alive}
    # One look at all objects, for it takes long. By their types, of which there are few; not by `isinstance`, which
    # runs the code of objects that stand for others.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    for owner in objects:
        if type(owner) in kinds:
            for name, each in parameter_registry(owner).items():
                if id(each) in wanted:
                    owners.setdefault(id(each), f"{name} of a {type(owner).__name__}, ")
    found = {}
    for place, parameter in alive:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        found[place] = f"{owners.get(id(parameter), '')}{place.partition(': ')[2]} ({shape})"
    return found
