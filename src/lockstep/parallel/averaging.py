"""How a wrapper averages gradients over one group: the mean, the reducer, and what the ranks compare in each backward.

It is made anew when the wrapper is connected to another group, and is not copied with the wrapper.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm import World, ordered_hook, ring_hook
from lockstep.parallel.comparison import ComparisonOptions, RankComparison
from lockstep.reduce import (
    CommHook,
    HookReduction,
    MeanReduction,
    Reducer,
    ReducerOptions,
    TrainedModel,
)
from lockstep.torch_private.modules import check_comm_hook


@final
class Averaging:
    """`reducer` is None where nothing is trained, and `comparison` for one rank too."""

    def __init__(self, model: TrainedModel, world: World, reducing: ReducerOptions, options: ComparisonOptions) -> None:
        self._world = world
        self.mean = MeanReduction(world)
        self.reducer: Reducer | None = None
        self.comparison: RankComparison | None = None
        if not model.trained:
            return
        self.reducer = Reducer(model, world, replace(reducing, local_mean=self.mean), self.mean)
        if world.world_size == 1:
            return
        self.comparison = RankComparison(
            model,
            world,
            self.reducer,
            options,
            is_asynchronous=any(reducing.is_asynchronous(each.spec.device) for each in model.trained),
        )
        self.reducer.schedule.observer = self.comparison

    def use_hook(self, hook: CommHook) -> None:
        """Let a user's hook reduce the buckets from now on (each rank calls, with the same hook)."""
        if self.reducer is None:
            return
        self.reducer.use_reduction(HookReduction(hook, self._world), only_gradients=True)
        if self.comparison is not None and not leaves_ranks_equal(hook.function):
            self.comparison.let_ranks_differ()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may run out of inputs now, so that they are not compared (each rank calls)."""
        if self.comparison is not None:
            self.comparison.set_joining(is_joining)


def check_options(nonfinite: str, on_skip: str) -> None:
    for name, value, known in (("nonfinite", nonfinite, ("stop", "skip")), ("on_skip", on_skip, ("error", "zeros"))):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}. (LS303)")


def check_hook(wrapper: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Check that a function has the signature of a hook, with torch's checks."""
    if getattr(hook, "__name__", "").startswith("bf16_compress"):
        return  # torch refuses these without NCCL; Gloo and shared memory add bfloat16 as well
    try:
        check_comm_hook(wrapper, hook)
    except KeyError as error:
        raise ValueError(
            "Communication hook: its second parameter must be called `bucket`: `def hook(state, bucket)`. (LS309)"
        ) from error


def built_in_hook(kind: dist.BuiltinCommHookType, group: ProcessGroup) -> CommHook:
    """Return the Python hook that does what torch's built-in one of this kind does."""
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
