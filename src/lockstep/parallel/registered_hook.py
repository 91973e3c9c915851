"""Communication hooks of `DistributedDataParallel`: which are taken, and torch's built-in ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm import ordered_hook, ring_hook
from lockstep.reduce import CommHook
from lockstep.torch_private.modules import check_comm_hook


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredHook:
    """A communication hook, as it was registered."""

    function: Callable[..., Any]
    """`function(state, bucket)`."""
    state: object
    """Its first argument."""
    name: str
    """What logging data call it."""

    def comm_hook(self) -> CommHook:
        return CommHook(function=self.function, state=self.state)


def built_in_hook(kind: dist.BuiltinCommHookType, group: ProcessGroup) -> RegisteredHook:
    """Return the Python hook that does what torch's built-in one of this kind does."""
    hooks: dict[dist.BuiltinCommHookType, Callable[..., Any]] = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return RegisteredHook(function=hooks[kind], state=group, name=str(kind))


def leaves_ranks_equal(function: Callable[..., Any]) -> bool:
    """Return whether a hook leaves the same gradients on all ranks: ours do, and torch's but that for local SGD."""
    function = getattr(function, "func", function)  # of a partial
    if function in (ring_hook, ordered_hook):
        return True
    module = getattr(function, "__module__", "") or ""
    return module.startswith("torch.distributed.algorithms.ddp_comm_hooks.") and "post_localSGD" not in module


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
