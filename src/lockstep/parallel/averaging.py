"""How a wrapper averages gradients over one group: the mean, the reducer, what the ranks compare, and the buffers.

`ModuleSync` is made anew when the wrapper is connected to another group, and is not copied with the wrapper. Here is
also what is averaged otherwise: by ranks that have run out of inputs, and parameters that are kept out of the buckets.

[Note: uneven inputs] Within `join`, per forward of the ranks that still have inputs, in this order; a joined rank takes
part in each:

    1 how many have inputs   all-reduce of ones (torch's Join)
    2 what follows           all-reduce of two flags: buffers before this forward? a reduction after it?
    3 buffers                from the highest rank that has inputs
    4 the reduction          zeros, and used-parameter counts of zero
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lockstep.comm import World, broadcast_tensors, ordered_hook, ring_hook
from lockstep.parallel.arguments import count_samples, puts_time_first
from lockstep.parallel.buffers import (
    ModuleBuffers,
    ModuleHook,
    broadcast_model,
    buffers_go_before_forward,
    send_no_buffers,
)
from lockstep.parallel.comparison import ComparisonOptions, RankComparison
from lockstep.processes.loaded_states import warn_of_missed_states
from lockstep.reduce import (
    CommHook,
    HookReduction,
    MeanReduction,
    Reducer,
    ReducerOptions,
    TrainedModel,
)
from lockstep.torch_private.autograd import queue_callback
from lockstep.torch_private.compiler_import import disable_compiler
from lockstep.torch_private.modules import (
    check_comm_hook,
    find_tensors,
    forward_pre_hooks,
    joins_uneven_inputs,
    sync_module_buffers,
)


@final
class ModuleSync(JoinHook):
    """Averages a module's gradients over one group, and does around a forward what a wrapper does.

    Also when the wrapper was deleted:

        model = DistributedDataParallel(model)
        return model.module                        # a recipe that many copy

    When torch's wrapper is deleted, each rank trains alone, without an error. So what the module's hooks need lives as
    long as the module, until the group is destroyed or the module is wrapped again. A living wrapper is asked for what
    it alone has: `join`, and a user's hook for buffers. For a rank without inputs it is the hook of torch's `Join`.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        model: TrainedModel,
        world: World,
        reducing: ReducerOptions,
        options: ComparisonOptions,
        delayed: "DelayedParameters | None",
    ) -> None:
        super().__init__()
        assert world.group is not None
        self.wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self.world = world
        self.mean = MeanReduction(world)
        self.divides_by_all = True
        """Within `join`: by all ranks, and not by those that still have inputs."""
        self.reducer: Reducer | None = None
        """None where nothing is trained; and `comparison` for one rank too."""
        self.comparison: RankComparison | None = None
        self.buffers = ModuleBuffers(model, world)
        self._model = model
        self._group = world.group
        self._device = wrapper.device
        self._delayed = delayed
        self._syncs_buffers = reducing.compares_buffers
        self._puts_time_first = puts_time_first(wrapper.module)
        if model.trained:
            self.reducer = Reducer(model, world, replace(reducing, local_mean=self.mean), self.mean)
            self.reducer.schedule.send_besides = partial(_start_weakly, weakref.WeakMethod(self.start_buffers))
        if self.reducer is not None and world.world_size > 1:
            is_asynchronous = any(reducing.is_asynchronous(each.spec.device) for each in model.trained)
            self.comparison = RankComparison(model, world, self.reducer, options, is_asynchronous=is_asynchronous)
            self.comparison.order.wrapper = self.wrapper
            if delayed is not None:
                self.comparison.watch_delayed(delayed.named)
            self.reducer.schedule.observer = self.comparison
        _close_orphans(wrapper.module)
        # On the inner module, so that a forward through `.module` is seen as well.
        self._handles: list[RemovableHandle] = [
            wrapper.module.register_forward_pre_hook(ForwardHook(self, self.before_forward), with_kwargs=True),
            wrapper.module.register_forward_hook(ForwardHook(self, self.after_forward), with_kwargs=True),
        ]

    def use_hook(self, hook: CommHook) -> None:
        """Let a user's hook reduce the buckets from now on (each rank calls, with the same hook)."""
        if self.reducer is None:
            return
        self.reducer.use_reduction(HookReduction(hook, self.world), only_gradients=True)
        if self.comparison is not None and not leaves_ranks_equal(hook.function):
            self.comparison.let_ranks_differ()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may run out of inputs now, so that they are not compared (each rank calls)."""
        if self.comparison is not None:
            self.comparison.set_joining(is_joining)

    def before_forward(self, module: nn.Module, _inputs: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Prepare for a forward (collective in training)."""
        if not self.world.has_group:
            return  # the module itself is called, to use it on one rank
        wrapper, reducer = self.wrapper(), self.reducer
        if reducer is not None:
            reducer.finish_interrupted()
        trains = module.training and torch.is_grad_enabled()
        sends_buffers = trains and (reducer is None or reducer.watch.synchronizes) and self._will_send_buffers(wrapper)
        joins = wrapper is not None and joins_uneven_inputs(wrapper)
        self.set_joining(joins)
        warn_of_missed_states(module if wrapper is None else wrapper)
        if self.comparison is not None and torch.is_grad_enabled():
            self.comparison.begin_forward(is_training=module.training)
        source = self._begin_joined_forward(wrapper, sends_buffers=sends_buffers) if joins else 0
        self.buffers.source = source
        if sends_buffers and buffers_go_before_forward(wrapper):
            self._send_buffers(wrapper, source)
        if trains and reducer is not None:
            if wrapper is not None:
                wrapper.logger.sample(reducer)
            reducer.times.begin_forward()

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Let its backward be reduced (collective where a user's hook sends buffers)."""
        wrapper, reducer = self.wrapper(), self.reducer
        if wrapper is not None and not buffers_go_before_forward(wrapper):
            syncs = self.world.has_group and torch.is_grad_enabled() and wrapper.require_backward_grad_sync
            if syncs and module.training and self._will_send_buffers(wrapper):
                self._send_buffers(wrapper, 0)
        if reducer is not None and torch.is_grad_enabled():
            given = [*inputs, *kwargs.values()]
            num_samples = count_samples(given, output, time_first=self._puts_time_first)
            outputs = list(find_tensors(output))
            on_reached = None
            if self.comparison is not None:
                on_reached = self.comparison.end_forward(module, given, outputs)
            reducer.mark(*outputs, num_samples=num_samples, on_reached=on_reached)
        if self._delayed is not None:
            self._delayed.prepare()

    def start_buffers(self) -> Callable[[], None]:
        """Begin to send the buffers beside the gradients, so that all ranks evaluate the same ones after each step.

        For every reduction, whether or not its forward was one in training: ranks must not differ in that. Returns what
        ends it (collective).
        """
        wrapper = self.wrapper()
        if not self._will_send_buffers(wrapper) or getattr(wrapper, "buffer_hook", None) is not None:
            return send_no_buffers
        if wrapper is None:
            self.buffers.source = 0  # it may have left that of a `join`
        return self.buffers.start()

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self.reducer is not None:
            self.reducer.close()
        if self.comparison is not None:
            self.comparison.close()

    def _will_send_buffers(self, wrapper: Any) -> bool:
        if wrapper is not None:
            return bool(wrapper.will_sync_module_buffers())
        return self._syncs_buffers and bool(self.buffers.named())

    def _send_buffers(self, wrapper: Any, source: int) -> None:
        if wrapper is not None:
            sync_module_buffers(wrapper, source)
        else:
            self.buffers.send()

    # -- Uneven inputs: [Note: uneven inputs] --------------------------------------------------------------------------

    def _begin_joined_forward(self, wrapper: Any, *, sends_buffers: bool) -> int:
        """Say to ranks without inputs what this forward does; return the rank whose buffers are sent (collective)."""
        work = Join.notify_join_context(wrapper)
        if work is not None and not self.divides_by_all:
            (num_ranks,) = work.get_future().wait()
            self.mean.divide_by(int(num_ranks.item()))
        reduces = torch.is_grad_enabled() and wrapper.require_backward_grad_sync and self.reducer is not None
        self._exchange_forward(buffers=sends_buffers, reduction=reduces)
        return self._highest_rank(is_candidate=True) if sends_buffers else self.buffers.source

    def main_hook(self) -> None:
        """Take part in a forward and backward of the others without inputs (collective)."""
        buffers, reduction = self._exchange_forward(buffers=False, reduction=False)
        if buffers:
            self._send_buffers(self.wrapper(), self._highest_rank(is_candidate=False))
        if reduction and self.reducer is not None:
            self.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Overwrite the model with that of a rank that joined last (collective)."""
        source = self._highest_rank(is_candidate=is_last_joiner)
        broadcast_model(self._model, self._group, source, with_buffers=self._syncs_buffers)
        self.mean.divide_by(self.world.world_size)
        self.set_joining(False)

    def _exchange_forward(self, *, buffers: bool, reduction: bool) -> tuple[bool, bool]:
        """Return whether any rank sends buffers before this forward, and reduces after it (collective)."""
        flags = torch.tensor([float(buffers), float(reduction)], device=self._device)
        dist.all_reduce(flags, group=self._group)
        any_buffers, any_reduction = flags.tolist()
        return any_buffers > 0, any_reduction > 0

    def _highest_rank(self, *, is_candidate: bool) -> int:
        """Return the highest rank of the group that is a candidate (collective; at least one rank is)."""
        own = torch.tensor([self._group.rank() if is_candidate else -1], device=self._device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group)
        return int(own.item())


@final
class ForwardHook(ModuleHook):
    def __init__(self, module_sync: ModuleSync, call: Callable[..., None]) -> None:
        self.module_sync = module_sync
        self._call = call

    @disable_compiler
    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)


def _close_orphans(module: nn.Module) -> None:
    """Remove the hooks of deleted wrappers of this module, which is about to be wrapped again (local)."""
    for hook in list(forward_pre_hooks(module).values()):
        if isinstance(hook, ForwardHook) and hook.module_sync.wrapper() is None:
            hook.module_sync.close()


def _start_weakly(method: "weakref.WeakMethod[Callable[[], Callable[[], None]]]") -> Callable[[], None]:
    start = method()
    return send_no_buffers if start is None else start()


def check_options(nonfinite: str, on_skip: str) -> None:
    for name, value, known in (("nonfinite", nonfinite, ("stop", "skip")), ("on_skip", on_skip, ("stop", "zeros"))):
        if value not in known and (name, value) != ("on_skip", "error"):
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}. (LS303)")


def check_hook(wrapper: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    if getattr(hook, "__name__", "").startswith("bf16_compress"):
        return  # torch refuses these without NCCL; Gloo and shared memory add bfloat16 as well
    try:
        check_comm_hook(wrapper, hook)
    except KeyError as error:
        raise ValueError(
            "Communication hook: its second parameter must be called `bucket`: `def hook(state, bucket)`. (LS309)"
        ) from error


def built_in_hook(kind: dist.BuiltinCommHookType, group: ProcessGroup) -> CommHook:
    hooks: dict[dist.BuiltinCommHookType, Callable[..., Any]] = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return CommHook(function=hooks[kind], state=group, name=str(kind))


def leaves_ranks_equal(function: Callable[..., Any]) -> bool:
    """Return whether a hook leaves the same gradients on all ranks: ours do, and torch's but that for local SGD."""
    function = getattr(function, "func", function)  # of a partial
    if function in (ring_hook, ordered_hook):
        return True
    module = getattr(function, "__module__", "") or ""
    return module.startswith("torch.distributed.algorithms.ddp_comm_hooks.") and "post_localSGD" not in module


def check_delayed(
    named: Iterable[tuple[str, nn.Parameter]] | None, trigger: Tensor | None
) -> list[tuple[str, nn.Parameter]]:
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time. (LS303)"
        )
    return list(named or ())


@final
class DelayedParameters:
    """Parameters that `delay_all_reduce_named_params` keeps out of the buckets: on one device, and of one dtype.

    This is for embedding tables whose gradients are not complete before a certain point of the backward: they lie in
    one buffer, which is reduced when the gradient of `trigger` arrives.
    """

    def __init__(self, module: nn.Module, named: Mapping[str, nn.Parameter], trigger: Tensor, world: World) -> None:
        assert world.group is not None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.named = named
        self._trigger_name = names.get(id(trigger), "")
        self._parameters = list(named.values())
        self.world = world
        first = self._parameters[0]
        sizes = [each.numel() for each in self._parameters]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self._buffer.split(sizes)
        self._places = [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]
        trigger.register_hook(self._reduce)

    @classmethod
    def of_names(cls, module: nn.Module, names: Sequence[str], trigger_name: str, world: World) -> Self:
        """Return those of a copied module, from `names_for_copy`."""
        named = dict(module.named_parameters())
        return cls(module, {name: named[name] for name in names}, named[trigger_name], world)

    def names_for_copy(self) -> tuple[list[str], str]:
        if not self._trigger_name:
            raise RuntimeError(
                "This wrapper cannot be copied or saved: its param_to_hook_all_reduce is no parameter of the module, "
                "so a copy would not have it. Copy the module, and wrap the copy. (LS324)"
            )
        return list(self.named), self._trigger_name

    def broadcast(self) -> None:
        """Overwrite the parameters with rank 0's (collective)."""
        assert self.world.group is not None
        broadcast_tensors(self.named.items(), self.world.group)

    def prepare(self) -> None:
        """Let `.grad` of each parameter lie in the buffer; called before its backward."""
        if all(each.grad is None for each in self._parameters):
            self._buffer.zero_()
        for each, place in zip(self._parameters, self._places, strict=True):
            if each.grad is None:
                each.grad = place
                place.zero_()

    def _reduce(self, _gradient: Tensor) -> None:
        if not self.world.has_group:
            return
        self._buffer.div_(self.world.world_size)
        work = dist.all_reduce(self._buffer, group=self.world.group, async_op=True)
        assert work is not None
        queue_callback(work.wait)  # at the end of this backward
