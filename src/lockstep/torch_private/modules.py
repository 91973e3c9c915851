"""What modules, optimizers and torch's own wrappers keep inside."""

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parallel.data_parallel import _check_balance
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

__all__ = [
    "AnyBatchNorm",
    "buffer_registry",
    "check_comm_hook",
    "find_tensors",
    "forget_scaling",
    "former_parameters_of",
    "forward_pre_hooks",
    "has_forward_or_backward_hooks",
    "has_step_on_device",
    "ignored_names",
    "localize_tensor_parallel",
    "make_replica_shell",
    "module_registry",
    "non_persistent_buffer_names",
    "optimizer_step_pre_hooks",
    "parameter_registry",
    "separate_registries",
    "set_precision_attributes",
    "set_state_dict_versions",
    "step_unless",
    "warn_of_unequal_devices",
]

parameter_registry: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The dictionary in which a module keeps its own parameters, not a copy: it stays the same one for the module's life.

Unlike `named_parameters` it shows names that are None, and a parameter with two names twice. For: seeing at little cost
whether a model has changed, and building replicas.
"""

buffer_registry: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Likewise a module's own buffers. A forward that assigns `self.mean = new` replaces the value here."""

module_registry: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Likewise a module's own children."""

# Bound here: torch's tests may put another class in the place of that name.
_check_comm_hook: Callable[..., None] = parallel.DistributedDataParallel._check_comm_hook

_REGISTRIES = ("_parameters", "_buffers", "_modules")

non_persistent_buffer_names: Callable[[nn.Module], Collection[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's own buffers that its `state_dict` leaves out: for a checkpoint that must warn of them."""

forward_pre_hooks: Callable[[nn.Module], Mapping[int, Any]] = attrgetter("_forward_pre_hooks")
"""A module's forward pre-hooks by number: for finding those of a wrapper that is gone."""

optimizer_step_pre_hooks: Callable[[Optimizer], Mapping[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
"""An optimizer's step pre-hooks by number: for finding the one guard that several trainers share."""


def forget_scaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Let a scaler forget what `unscale_` and `step` have recorded of an optimizer since the last `update`.

    For: a step whose optimizer has raised, and which is taken again. Without it `unscale_` raises an error, for it has
    been called already.
    """
    scaler._per_optimizer_states.pop(id(optimizer), None)


find_tensors: Callable[[Any], Iterable[Tensor]] = _find_tensors
"""The tensors in a module's output, found as torch's own DDP finds them (lists, dictionaries, dataclasses, RRefs)."""

warn_of_unequal_devices: Callable[[list[int]], None] = _check_balance
"""Warn of a GPU with much less memory or fewer cores than the others, as `torch.nn.DataParallel` does."""


def has_forward_or_backward_hooks(module: nn.Module) -> bool:
    """Whether calling a module runs hooks; its full backward hooks included, hooks on its state_dict not."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def separate_registries(state: dict[str, Any]) -> None:
    """Give a copy of a module's `__dict__` registries of its own, so that the two do not share children."""
    for registry in _REGISTRIES:
        state[registry] = dict(state[registry])


def make_replica_shell(module: nn.Module) -> Any:
    """Return a shallow copy of a module in the way in which its class wants it made, without tensors or children.

    It has registries of its own, with no parameters; buffers and children are the module's until they are replaced.
    Libraries look for a replica's parameters in `former_parameters_of`, which is empty at first.
    """
    shell: Any = module._replicate_for_data_parallel()
    # Not by setting an attribute, for which a class may have a way of its own that leads to the module.
    vars(shell)["_former_parameters"] = {}
    return shell


former_parameters_of: Callable[[Any], dict[str, Tensor]] = attrgetter("_former_parameters")
"""Where a replica's parameters are, which are no `nn.Parameter`s: torch's DDP and libraries read it."""


def set_precision_attributes(parameter: nn.Parameter, low: torch.dtype) -> None:
    """Give a parameter the attributes by which torch's mixed-precision DDP names it in either precision.

    `_fp_param` is the parameter's data; `_mp_param`, between steps, a tensor of the low dtype without memory. torch's
    own tests of DDP read them.
    """
    named: Any = parameter
    named._fp_param = parameter.data
    named._mp_param = torch.empty(0, dtype=low, device=parameter.device)


def set_state_dict_versions(state: dict[str, Any], versions: Mapping[str, Any]) -> None:
    """Tell `load_state_dict` which version of each module's class wrote a state, by the module's path.

    Modules convert what an earlier version wrote: BatchNorm before version 2 has no `num_batches_tracked`.
    """
    vars(state)["_metadata"] = versions


def ignored_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names that torch's `_set_params_and_buffers_to_ignore_for_model` has set on a module."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def check_comm_hook(wrapper: parallel.DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Check a communication hook's signature as torch's DDP does; KeyError if its second parameter is not `bucket`."""
    _check_comm_hook(wrapper, hook)


def has_torchs_comm_hook(wrapper: parallel.DistributedDataParallel) -> bool:
    """Return whether a communication hook was registered on an object of torch's wrapper."""
    return len(wrapper._comm_hooks) > 0


def stop_torchs_reducer(wrapper: parallel.DistributedDataParallel) -> None:
    """Remove the hooks of the C++ reducer of torch's wrapper from the parameters, so that it reduces no more."""
    wrapper._remove_autograd_hooks()


def localize_tensor_parallel(module: nn.Module) -> None:
    """Make a tensor-parallel module's parameters local between forwards and sharded within, as torch's DDP does."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)


def has_step_on_device(optimizer: Optimizer) -> bool:
    """Return whether `step_unless` works: one of torch's own classes with `fused=True`, without hooks after its step.

    `_step_supports_amp_scaling` is how `GradScaler` finds it out. A class that is derived from torch's may write
    something else in its step, and a hook may, unless its attribute `only_looks` is true: these are not left out.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False  # it need not have torch's attributes: several optimizers that are seen as one have none
    hooks = (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(getattr(hook, "only_looks", False) for hook in hooks)
    )


def step_unless(optimizer: Optimizer, is_bad: Tensor) -> None:
    """Make a step that is left out on the device where `is_bad`, a tensor of one truth value there, is true.

    As `GradScaler.step` does with torch's fused optimizers, which read these two attributes.
    """
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, is_bad.float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
