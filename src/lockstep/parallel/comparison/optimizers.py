"""Which optimizers update a model, how often, and with what: seen through torch's hooks on the steps of all optimizers.

Not all that they hold is the wrapped model's:

    backbone = ls.DistributedDataParallel(Backbone())
    head = nn.Linear(8, 3)                                              # its gradients are those of this rank alone
    optimizer = SGD([*backbone.parameters(), *head.parameters()], 0.1)

A gradient of such a parameter is not averaged, so after the first step it is another one on each rank. That is seen in
the next backward: their values are compared like those of the wrapped model. It is a warning and not an error, for in
model parallelism ranks have parameters of their own on purpose.

The other mistake of this kind is an optimizer that holds the parameters of a copy of the model: nobody's gradient
arrives there, and the parameters that get one are in no optimizer.
"""

import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Final, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.errors import ReductionError
from lockstep.parallel.comparison.check import (
    SWITCH,
    Check,
    Lines,
    Scope,
    find_objects,
)
from lockstep.parallel.comparison.values import ReplicaValues
from lockstep.processes.user_line import NO_LINE, CodeLine, stacklevel_of_user, user_line
from lockstep.reduce.current_plan import has_place
from lockstep.reduce.model import Description, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.compiler_import import disable_compiler
from lockstep.torch_private.modules import parameter_registry, version_of

_NUM_IDLE: Final = 3
"""After so many reductions an optimizer whose parameters never have gradients is an error."""
_NUM_FIRST: Final = 4
_NUM_BETWEEN: Final = 64
"""In an optimizer's first steps and then in every so many-th is looked which parameters have a wrapper: for all of them
that takes as long as a step."""
_NUM_IDLE_LOOKS: Final = 16
"""After so many looks in vain an optimizer is not looked at any more, until it or the model has other parameters."""
_NUM_UNKNOWN: Final = 3
"""After so many exchanges in which a rank had nothing to compare such parameters are compared no more."""
_NUM_READ_ON_DEVICE: Final = 4
"""So often they are read on an asynchronous device, where reading them waits for it."""


class StepListener(Protocol):
    """Is called around the steps of all optimizers of this process."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at a step that begins."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at a step that has ended."""


def listen_to_steps(listener: StepListener) -> Callable[[], None]:
    """Call `listener`, which is held weakly, around the steps of all optimizers; return what ends it.

    All listeners of the process share one pair of torch's hooks, so that a step pays for them once. A listener that is
    gone is left out, and its place is given up by the next call of this. A finalizer must not: the garbage collector
    may call it within a step.
    """
    _LISTENERS[:] = [each for each in _LISTENERS if each() is not None]
    if not _HANDLES:
        _HANDLES.append(register_optimizer_step_pre_hook(StepHook(_call_before)))
        _HANDLES.append(register_optimizer_step_post_hook(StepHook(_call_after)))
    reference = weakref.ref(listener)
    _LISTENERS.append(reference)
    return partial(_stop_listening, reference)


def _stop_listening(reference: "weakref.ref[StepListener]") -> None:
    """Call it no more; a second time does nothing."""
    if reference in _LISTENERS:
        _LISTENERS.remove(reference)
    while _HANDLES and not _LISTENERS:
        _HANDLES.pop().remove()


@final
class StepHook:
    only_looks = True
    """For `has_step_on_device`: it writes nothing, also where its wrapper is not that of the optimizer."""

    def __init__(self, call: Callable[[Optimizer], None]) -> None:
        self._call = call

    @disable_compiler
    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._call(optimizer)


def _call_before(optimizer: Optimizer) -> None:
    before, lists = _HELD.get(optimizer, ()), [group["params"] for group in optimizer.param_groups]
    if len(before) != sum(map(len, lists)) or not all(map(is_, before, chain.from_iterable(lists))):
        _HELD[optimizer] = _list_parameters(optimizer)
    for reference in tuple(_LISTENERS):
        listener = reference()
        if listener is not None:
            listener.before_step(optimizer)


def _call_after(optimizer: Optimizer) -> None:
    for reference in tuple(_LISTENERS):
        listener = reference()
        if listener is not None:
            listener.after_step(optimizer)


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


_LISTENERS: Final[list["weakref.ref[StepListener]"]] = []
"""All of this process: torch's hooks are the process' too."""
_HANDLES: Final[list[RemovableHandle]] = []
_HELD: Final["weakref.WeakKeyDictionary[Optimizer, Sequence[nn.Parameter]]"] = weakref.WeakKeyDictionary()
"""The parameters of each optimizer: another list where it has others, so that listeners look at them once."""


def has_optimizer(parameters: Collection[int]) -> bool:
    """Return whether an optimizer of this process holds a parameter with one of these ids (local; it takes long)."""
    groups = chain.from_iterable(getattr(each, "param_groups", ()) for each in find_objects(Optimizer))
    return any(id(parameter) in parameters for group in groups for parameter in group["params"])


@dataclass(slots=True, kw_only=True)
class HeldParameters:
    """Those of an optimizer, as a wrapper sees them; made anew when the optimizer or the model has others."""

    all: Sequence[nn.Parameter]
    known: Sequence[nn.Parameter]
    """Those of the wrapped model."""
    others: Sequence[nn.Parameter]
    """Those that are not the wrapped module's at all."""
    num_steps: int = 0
    num_idle_looks: int = 0
    """How often was looked for parameters that never have gradients, in vain."""


@dataclass(frozen=True, slots=True)
class _NumberedOptions:
    values: Sequence[object]
    """The same objects have the same number; empty if that cannot be told from the objects."""
    keys: Sequence[object]
    """Equal ones have the same number."""
    number: int
    """Made from the options in words, which takes longest."""


@final
class OptimizerSteps:
    """Steps since the last reduction, not those within another's; `owned` are ids of all parameters ever stepped."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.owned: set[int] = set()
        self.line: CodeLine = NO_LINE
        self.had_state: bool | None = None
        """Whether the optimizer that stepped first had a state before: it was loaded."""
        self.running: list[int] = []
        """Ids of the optimizers whose steps have begun: the last one within the one before it."""
        self._stepped: list[weakref.ref[Optimizer]] = []
        self._options: weakref.WeakKeyDictionary[Optimizer, _NumberedOptions] = weakref.WeakKeyDictionary()
        self.held: weakref.WeakKeyDictionary[Optimizer, HeldParameters] = weakref.WeakKeyDictionary()

    @property
    def stepped(self) -> list[Optimizer]:
        """Those that have stepped, in the order of their first steps."""
        return [each for each in (reference() for reference in self._stepped) if each is not None]

    def parameters_of(
        self, optimizer: Optimizer, known: Collection[int], ignored: Collection[int] = ()
    ) -> HeldParameters:
        """Return the parameters of an optimizer: those whose ids are `known`, and the others (local)."""
        before = self.held.get(optimizer)
        held = _HELD.get(optimizer)
        if before is None or held is None or before.all is not held:
            held = _HELD.setdefault(optimizer, _list_parameters(optimizer)) if held is None else held
            before = self.held[optimizer] = HeldParameters(
                all=held,
                known=[each for each in held if id(each) in known],
                # Not those whose parts lie on several ranks, which a DTensor is.
                others=[
                    each
                    for each in held
                    if id(each) not in known and id(each) not in ignored and type(each.detach()) is Tensor
                ],
            )
            self.owned.update(map(id, before.known))
        return before

    def begin(self, optimizer: Optimizer) -> None:
        self._leave(optimizer)  # its last step may have failed
        self.line = user_line()
        if self.had_state is None:
            self.had_state = len(optimizer.state) > 0
        if not self.running and all(reference() is not optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))
        self.running.append(id(optimizer))

    def end(self, optimizer: Optimizer) -> None:
        self._leave(optimizer)
        self.num_steps += not self.running

    def _leave(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self.running:
            del self.running[self.running.index(id(optimizer)) :]

    def begin_anew(self) -> None:
        self.num_steps = 0
        self._stepped.clear()

    def number(self) -> int:
        return hash(tuple(map(self._number_of_options, self.stepped)))

    def describe(self, names: Mapping[int, str]) -> tuple[Description, ...]:
        """Return these options in words, and which parameters they are for; `names` by identity (local)."""
        return tuple({**describe_options(each), **_describe_groups(each.param_groups, names)} for each in self.stepped)

    def _number_of_options(self, optimizer: Optimizer) -> int:
        values = [value for group in optimizer.param_groups for value in group.values()]
        known = self._options.get(optimizer)
        if known is not None and len(values) == len(known.values) and all(map(is_, values, known.values)):
            return known.number
        options = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
        keys = [*map(_key, options)]
        if known is not None and known.keys == keys:
            number = known.number
        else:
            number = zlib.crc32(repr(describe_options(optimizer)).encode())
        may_be_written = any(isinstance(value, Tensor | list | dict) for value in options)
        self._options[optimizer] = _NumberedOptions([] if may_be_written else values, keys, number)
        return number


def _describe_groups(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, str]:
    described = {}
    for number, group in enumerate(groups):
        held = [names.get(id(each), "another") for each in group["params"]]
        more = f" and {len(held) - 3} more" if len(held) > 3 else ""  # noqa: PLR2004 - as many as are listed
        text = f"{', '.join(held[:3])}{more} (order {zlib.crc32(repr(held).encode()):08x})"
        described[f"the list of parameters of parameter group {number}"] = text
    return described


def _key(value: object) -> object:
    """Return what changes when an option does. A tensor's values are not read: on a GPU that would wait."""
    if isinstance(value, list | dict):
        return repr(value)
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def sum_up_state(optimizer: Optimizer) -> dict[str, int]:
    """Return a number for each kind of entry of an optimizer's state, as `exp_avg` is one."""
    sums: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel():
                    sums[str(name)] = sums.get(str(name), 0) * 3 + int(sum_of_bits([value]))
                elif isinstance(value, int | float):
                    sums[str(name)] = sums.get(str(name), 0) * 3 + hash(value)
    return sums


@dataclass(frozen=True, slots=True)
class OutsideValue:
    """A parameter that is outside of every wrapper, as ranks compare it."""

    name: str
    shape: tuple[int, ...]
    bits: int
    total: float


@final
class OutsideParameters(Check):
    scope = Scope.REPLICAS

    def __init__(self, *, may_read: bool) -> None:
        self._may_read = may_read
        self._places: dict[str, weakref.ref[nn.Parameter]] = {}
        self._values = ReplicaValues(self._list_parameters, lambda: True, may_read=True)
        self._num_read = self._num_unknown = 0
        self._is_asked = True

    def note_step(self, optimizer: Optimizer, held: HeldParameters) -> None:
        """Look for such parameters in an optimizer's first steps, and now and then (local)."""
        if not self._is_asked or not self.is_compared:
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
        if not self._places or not self._is_asked:
            return 0
        self._num_read += 1
        return self._values.number() if self._may_read or self._num_read <= _NUM_READ_ON_DEVICE else 0

    def record(self) -> tuple[OutsideValue, ...] | None:
        """Return the values; None where this rank does not know them: an optimizer has stepped again since."""
        if not self._places or not self._is_asked:
            return ()
        numbers = self._values.describe()
        if not numbers:
            return None
        alive = self._list_parameters()
        names = _describe(alive)
        return tuple(
            OutsideValue(names[place], tuple(each.shape), numbers[place].bits, numbers[place].total)
            for place, each in alive
            if place in numbers
        )

    def judge(self, found: Sequence[tuple[OutsideValue, ...] | None], lines: Sequence[Lines]) -> None:  # noqa: ARG002
        """Warn once where they differ: in model parallelism they may."""
        if not self._is_asked or (len(set(found)) == 1 and None not in found):
            return
        known = [each for each in found if each]
        if len(known) < len(found):  # a rank does not know them, or has none
            self._values.compare([{}])
            self._num_unknown += 1
            self._is_asked = self._num_unknown < _NUM_UNKNOWN
            return
        self._is_asked = False  # that they differ was said, or they are different things
        text = find_outside_difference(known)
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
    for owner in find_objects(nn.Module):
        for name, each in parameter_registry(owner).items():
            if id(each) in wanted:
                owners.setdefault(id(each), f"{name} of a {type(owner).__name__}, ")
    found = {}
    for place, parameter in alive:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        found[place] = f"{owners.get(id(parameter), '')}{place.partition(': ')[2]} ({shape})"
    return found
