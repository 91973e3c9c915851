"""Which optimizers update a model, and how often: seen through torch's hooks on the steps of all optimizers."""

import gc
import weakref
import zlib
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

from lockstep.processes.user_line import NO_LINE, CodeLine, user_line
from lockstep.reduce.model import Description, describe_options
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.compiler import disable_compiler
from lockstep.torch_private.modules import version_of


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
    """A hook on the steps of all optimizers."""

    only_looks = True
    """For `has_step_on_device`: it writes nothing, also where its wrapper is not that of the optimizer."""

    def __init__(self, call: Callable[[Optimizer], None]) -> None:
        self._call = call

    @disable_compiler
    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._call(optimizer)


def _call_before(optimizer: Optimizer) -> None:
    before, held = _HELD.get(optimizer, ()), _list_parameters(optimizer)
    if len(before) != len(held) or not all(map(is_, before, held)):
        _HELD[optimizer] = held
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
"""Those of torch's hooks, while there are listeners."""
_HELD: Final["weakref.WeakKeyDictionary[Optimizer, Sequence[nn.Parameter]]"] = weakref.WeakKeyDictionary()
"""The parameters of each optimizer: another list where it has others, so that listeners look at them once."""


def has_optimizer(parameters: Collection[int]) -> bool:
    """Return whether an optimizer of this process holds a parameter with one of these ids (local; it takes long)."""
    # By their types, of which there are few; not by `isinstance`, which runs the code of objects that stand for others.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Optimizer)}
    groups = chain.from_iterable(getattr(each, "param_groups", ()) for each in objects if type(each) in kinds)
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
    """How many steps were looked at."""
    num_idle_looks: int = 0
    """How often was looked for parameters that never have gradients, in vain."""


@dataclass(frozen=True, slots=True)
class _NumberedOptions:
    """The options of an optimizer, and the number that stands for them."""

    values: Sequence[object]
    """The same objects have the same number; empty if that cannot be told from the objects."""
    keys: Sequence[object]
    """Equal ones have the same number."""
    number: int
    """Made from the options in words, which takes longest."""


@final
class OptimizerSteps:
    """The steps of one rank's optimizers over some parameters, since the last reduction.

    A step within another optimizer's does not count. `owned` are ids of all known parameters that ever were in a step.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.owned: set[int] = set()
        self.line: CodeLine = NO_LINE
        self._running: list[int] = []
        self._stepped: list[weakref.ref[Optimizer]] = []
        self._options: weakref.WeakKeyDictionary[Optimizer, _NumberedOptions] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[Optimizer, HeldParameters] = weakref.WeakKeyDictionary()

    @property
    def is_stepping(self) -> bool:
        return bool(self._running)

    @property
    def stepped(self) -> list[Optimizer]:
        """Those that have stepped, in the order of their first steps."""
        return [each for each in (reference() for reference in self._stepped) if each is not None]

    def parameters_of(
        self, optimizer: Optimizer, known: Collection[int], ignored: Collection[int] = ()
    ) -> HeldParameters:
        """Return the parameters of an optimizer: those whose ids are `known`, and the others (local)."""
        before = self._held.get(optimizer)
        held = _HELD.get(optimizer)
        if before is None or held is None or before.all is not held:
            held = _HELD.setdefault(optimizer, _list_parameters(optimizer)) if held is None else held
            before = self._held[optimizer] = HeldParameters(
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

    def forget_parameters(self) -> None:
        """Look anew which parameters the optimizers have (local)."""
        self._held.clear()

    def begin(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._running:  # its last step has failed
            self._running = self._running[: self._running.index(id(optimizer))]
        self.line = user_line()
        if not self._running and all(reference() is not optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))
        self._running.append(id(optimizer))

    def end(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._running:
            self._running = self._running[: self._running.index(id(optimizer))]
        self.num_steps += not self._running

    def begin_anew(self) -> None:
        """Forget the steps: there was a reduction (local)."""
        self.num_steps = 0
        self._stepped.clear()

    def number(self) -> int:
        """Return a number for the options of the optimizers that have stepped (local)."""
        return hash(tuple(map(self._number_of_options, self.stepped)))

    def describe(self, names: Mapping[int, str]) -> tuple[Description, ...]:
        """Return these options in words, and which parameters they are for; `names` by identity (local)."""
        return tuple({**describe_options(each), **_describe_groups(each.param_groups, names)} for each in self.stepped)

    def describe_states(self) -> tuple[Mapping[str, int], ...]:
        """Return a number for each kind of entry of their states, as `exp_avg` is one (local)."""
        return tuple(map(_sum_up_state, self.stepped))

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


def _sum_up_state(optimizer: Optimizer) -> dict[str, int]:
    sums: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel():
                    sums[str(name)] = sums.get(str(name), 0) * 3 + int(sum_of_bits([value]))
                elif isinstance(value, int | float):
                    sums[str(name)] = sums.get(str(name), 0) * 3 + hash(value)
    return sums
