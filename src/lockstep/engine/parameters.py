"""What user code does with parameters while the shards of a step run: its hooks on them, and writes to them.

[Note: hooks on parameters] The user's hooks are given the gradient of the whole batch, as in a plain loop.
A backward here is of one shard, and its gradient is weighted: a hook that clips it, or steps by it, would compute
something else. So the hooks are taken off while the shards run. When the gradients are reduced they are called, for
each parameter that has a gradient: first those of `register_hook`, which may replace it, then those of
`register_post_accumulate_grad_hook`. Gradients are clipped after that.

[Note: parameters that are written] An average of the weights that a forward keeps in frozen parameters is updated once
per shard: after a step it would depend on which shards a worker has run. Writes show in a tensor's version, and
replaced memory in its address. Writes through `.data` show in neither; for them the contents are compared, in the first
steps only, for that reads every parameter.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import World, calls_for
from lockstep.engine.batches import gather_results
from lockstep.engine.run_state import RunState
from lockstep.engine.step_table import FAILURE, Column, CurrentStep, Rows, StepPart
from lockstep.errors import LossError
from lockstep.reduce.model import TrainedParameter
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.torch_private.autograd import post_accumulate_grad_hooks, tensor_hooks
from lockstep.torch_private.modules import version_of

_HOOKS_PURPOSE = "calling the hooks on parameters"
_PUTTING_BACK = "putting back parameters that a forward has written"
_OWN = "lockstep."
"""Our own hooks are partials of functions in our modules."""
_NUM_COMPARED = 3
"""The first steps in which contents are compared. An average that starts from equal weights is equal after step 1."""
_WRITTEN = "A forward or the loss function had written parameters."


@final
class ParameterHooks(StepPart):
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
            step.ask(_HOOKS_PURPOSE, lambda: {} if step.problem else self._call(), self._compare)

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


@final
class WrittenParameters(StepPart):
    def __init__(self, state: RunState, world: World) -> None:
        self._state, self._world = state, world
        self._has_several = state.num_shards > 1
        self._cover(state.networks.parameters)
        self._before: tuple[list[int], list[int]] | None = None
        self._bits: Tensor | None = None
        self._written: list[int] = []
        self._first = Column(int, self._find, is_of_failed=True)
        self.columns = (self._first,)

    def _cover(self, of_networks: Mapping[str, nn.Parameter]) -> None:
        self._of_networks = of_networks
        named = {**dict(self._state.model.named_parameters()), **of_networks}
        self._names, self._parameters = list(named), list(named.values())
        self._memory = [(each.shape, each.dtype, each.device, each.stride()) for each in self._parameters]

    def begin(self, step: CurrentStep) -> None:
        if self._state.networks.parameters is not self._of_networks:
            self._cover(self._state.networks.parameters)
            self._state.findings.num_contents_compared = 0
        step.has_recorded_parameters = True
        self._written = []
        self._before = self._look()
        reads = self._has_several and self._state.findings.num_contents_compared < _NUM_COMPARED
        self._bits = self._read_bits() if reads else None

    def check(self, step: CurrentStep, rows: Rows) -> None:
        rank, number = next(((rank, each) for rank, each in enumerate(rows[self._first]) if each), (0, 0))
        if not number:
            return
        try:
            lost = self._put_back()
        except BaseException:
            self._state.mark_unusable(_WRITTEN)
            raise
        if lost:
            self._state.mark_unusable(f"A forward or the loss function had written to {', '.join(lost[:3])}.")
        if any(rows[FAILURE]):
            return  # that error is raised
        left = "It was put back on every rank. No parameter was changed."
        if lost:
            left = (
                f"Every rank has written {', '.join(lost[:3])}, which cannot be put back: load a checkpoint on every "
                "rank, trainer.load(path), or start again."
            )
        raise LossError(
            f"Parameter {self._names[number - 1]} was written on rank {rank} while the shards of "
            f"{step.place} ran, by a forward, the loss function or a hook. Each worker runs other "
            "shards, so the weights would depend on the number of workers. Keep an average of the weights in "
            f"buffers, or update it between two steps; do without max_norm in an embedding. {left} (LS518)"
        )

    def undo(self, step: CurrentStep) -> None:
        """Note parameters that the only shard of a run has written, which is no error if the step succeeds (local)."""
        if step.rows is not None and not self._has_several and self._find_in_failed():
            self._state.mark_unusable(_WRITTEN)

    def _find(self, step: CurrentStep) -> int:
        if step.failure:
            return self._find_in_failed() if step.has_recorded_parameters else 0
        return self._find_first() if self._has_several else 0

    def _find_in_failed(self) -> int:
        try:
            return self._find_first()
        except Exception:  # noqa: BLE001 - a device that has failed cannot be read, and the others wait for this worker
            self._state.mark_unusable("Whether a forward had written parameters could not be read.")
            return 0

    def _find_first(self) -> int:
        """Return the number of the first parameter that was written, from 1; the same until the next `begin`."""
        if self._before is not None:
            before, self._before = self._before, None
            written = {
                number
                for earlier, now in zip(before, self._look(), strict=True)
                for number, (old, new) in enumerate(zip(earlier, now, strict=True), start=1)
                if old != new
            }
            if self._bits is not None:
                is_changed = (self._read_bits() != self._bits).tolist()  # the one wait for a device
                written.update(number for number, changed in enumerate(is_changed, start=1) if changed)
                self._state.findings.num_contents_compared += 1
                self._bits = None
            self._written = sorted(written)
        return min(self._written, default=0)

    def _look(self) -> tuple[list[int], list[int]]:
        return list(map(version_of, self._parameters)), list(map(Tensor.data_ptr, self._parameters))

    def _read_bits(self) -> Tensor:
        """Return a number for the contents of each parameter, without waiting for a device."""
        device = self._parameters[0].device
        return torch.stack([sum_of_bits([parameter]).to(device) for parameter in self._parameters])

    def _put_back(self) -> list[str]:
        """Give written parameters the values of a worker that has not written them (collective).

        Where a parameter was given memory of another shape, it gets memory of its own shape again.
        Returns the names of those that every worker has written, whose values are lost; the same on all.
        """
        with calls_for(_PUTTING_BACK):
            found: list[list[int]] = self._world.gather_objects(self._written)
        sources = {
            number: next((rank for rank, written in enumerate(found) if number not in written), None)
            for number in sorted(set().union(*found))
        }
        sent = {number - 1: source for number, source in sources.items() if source is not None}
        messages: dict[torch.device, Tensor] = {}

        def allocate() -> None:
            for number in self._written:
                self._restore_memory(number - 1)
            messages.update(_allocate_messages([self._parameters[index] for index in sent]))

        gather_results(
            self._world, allocate, _PUTTING_BACK
        )  # before the first message: no rank waits for one without memory
        if self._world.group is not None:
            for index, source in sent.items():
                self._broadcast(self._parameters[index].data, source, messages)
        return [self._names[number - 1] for number, source in sources.items() if source is None]

    def _restore_memory(self, index: int) -> None:
        """Give a parameter memory as it had, if it has other memory; the values in it are any."""
        parameter, (shape, dtype, device, stride) = self._parameters[index], self._memory[index]
        if (parameter.shape, parameter.dtype, parameter.device) != (shape, dtype, device):
            parameter.data = torch.empty_strided(shape, stride, dtype=dtype, device=device)

    @torch.no_grad()
    def _broadcast(self, values: Tensor, source: int, messages: dict[torch.device, Tensor]) -> None:
        message = messages[values.device][: values.nbytes]
        place = message.view(values.dtype).view(values.shape)
        if self._world.rank == source:
            place.copy_(values)
        with calls_for(_PUTTING_BACK):
            dist.broadcast(message, group=self._world.group, group_src=source)
        if self._world.rank != source:
            values.copy_(place)


def _allocate_messages(parameters: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Return memory for the largest of these on each device: bytes, so that it carries every dtype."""
    sizes: dict[torch.device, int] = {}
    for each in parameters:
        sizes[each.device] = max(sizes.get(each.device, 0), each.nbytes)
    return {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
