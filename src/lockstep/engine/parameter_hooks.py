"""The user's hooks on parameters: they are given the gradient of the whole batch, as in a plain loop.

A backward here is of one shard, and its gradient is weighted: a hook that clips it, or steps by it, would compute
something else. So the hooks are taken off while the shards run. When the gradients are reduced they are called, for
each parameter that has a gradient: first those of `register_hook`, which may replace it, then those of
`register_post_accumulate_grad_hook`. Gradients are clipped after that.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, final

from torch import nn

from lockstep.comm import World
from lockstep.engine.step_table import Column, CurrentStep, Rows, StepPart
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.autograd import post_accumulate_grad_hooks, tensor_hooks

_PURPOSE = "calling the hooks on parameters"
_OWN = "lockstep."
"""Our own hooks are partials of functions in our modules."""


@final
class ParameterHooks(StepPart):
    """Takes the user's hooks off the parameters of a model, calls them, and puts them on again."""

    def __init__(self, trained: Sequence[TrainedParameter], world: World) -> None:
        self._parameters = [each.parameter for each in trained]
        self._names = {each.parameter: each.spec.name for each in trained}
        self._world = world
        self._num_own = -1
        self._taken: list[tuple[nn.Parameter, dict[int, Any], dict[int, Any]]] = []
        self._are_there = Column(bool, lambda _: bool(self._taken))
        self.columns = (self._are_there,)

    def begin(self, _step: CurrentStep) -> None:
        self._take_off()

    def check(self, step: CurrentStep, rows: Rows) -> None:
        step.has_hooks = any(rows[self._are_there])
        if step.has_hooks:
            # Not where the step fails, or is left out: a hook may step an optimizer.
            step.ask(_PURPOSE, lambda: {} if step.problem else self._call(), self._compare)

    def commit(self, _step: CurrentStep) -> None:
        self._put_on()

    def undo(self, _step: CurrentStep) -> None:
        self._put_on()

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        self._take_off()
        try:
            yield
        finally:
            self._put_on()

    def _compare(self, found: list[dict[str, int | None]]) -> None:
        for rank, numbers in enumerate(found):
            if numbers != found[0]:
                names = [name for name in {**found[0], **numbers} if found[0].get(name) != numbers.get(name)]
                raise ValueError(
                    f"The hooks on parameter {names[0]} give another gradient on rank {rank} than on rank 0. Register "
                    "the same hooks on every rank, and let them depend on the gradient alone. "
                    "No parameter was changed. (LS520)"
                )

    def _call(self) -> dict[str, int | None]:
        """Call them; return a number for each gradient that they changed: hooks that only look may be on one rank."""
        reduced = self._number_gradients()
        for parameter, before, after in self._taken:
            if parameter.grad is None:
                continue
            for hook in before.values():
                replaced = hook(parameter.grad)
                if replaced is not None:
                    parameter.grad = replaced
            for hook in after.values():
                hook(parameter)
        return {name: number for name, number in self._number_gradients().items() if number != reduced[name]}

    def _number_gradients(self) -> dict[str, int | None]:
        gradients = {self._names[parameter]: parameter.grad for parameter, *_ in self._taken}
        return {
            name: None if each is None else 0 if self._world.world_size == 1 else int(sum_of_bits([each]))
            for name, each in gradients.items()
        }

    def _take_off(self) -> None:
        registries = chain(map(tensor_hooks, self._parameters), map(post_accumulate_grad_hooks, self._parameters))
        num_hooks = sum(map(len, filter(None, registries)))
        if num_hooks == self._num_own:
            return
        for parameter in self._parameters:
            before, after = (_take(hooks(parameter)) for hooks in (tensor_hooks, post_accumulate_grad_hooks))
            if before or after:
                self._taken.append((parameter, before, after))
        self._num_own = num_hooks - sum(len(before) + len(after) for _, before, after in self._taken)

    def _put_on(self) -> None:
        for parameter, before, after in self._taken:
            _put(tensor_hooks(parameter), before)
            _put(post_accumulate_grad_hooks(parameter), after)
        self._taken = []


def _take(registry: MutableMapping[int, Any] | None) -> dict[int, Any]:
    if not registry:
        return {}
    found = {number: hook for number, hook in registry.items() if not _is_own(hook)}
    for number in found:
        del registry[number]
    return found


def _put(registry: MutableMapping[int, Any] | None, hooks: dict[int, Any]) -> None:
    if registry is None or not hooks:
        return
    registry.update(hooks)
    own = {number: hook for number, hook in registry.items() if number not in hooks}
    for number, hook in own.items():  # ours run last
        del registry[number]
        registry[number] = hook


def _is_own(hook: Any) -> bool:
    return isinstance(hook, partial) and str(getattr(hook.func, "__module__", "")).startswith(_OWN)
