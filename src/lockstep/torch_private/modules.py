"""What modules, optimizers and torch's own wrappers keep inside; storages, nested values, kernels of devices."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage, nn
from torch.amp import GradScaler
from torch.nn import parallel
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchsSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.parallel.data_parallel import _check_balance
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# `TorchsSyncBatchNorm` is bound here, before `lockstep.drop_in` puts ours in the place of torch's name: layers that
# were made before that are of torch's class.
__all__ = ["AnyBatchNorm", "TorchDispatchMode", "TorchsSyncBatchNorm", "tree_leaves", "tree_map_only"]
# tree_leaves and tree_map_only are the walk that torch itself uses over nested values: lists, tuples, named tuples,
# dictionaries, and classes that libraries have registered (`ModelOutput` of transformers).
# TorchDispatchMode sees every operation within, after autograd.

parameter_registry: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The dictionary in which a module keeps its own parameters, not a copy: it stays the same one for the module's life.

Unlike `named_parameters` it shows names that are None, and a parameter with two names twice.
"""

buffer_registry: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Likewise a module's own buffers. A forward that assigns `self.mean = new` replaces the value here."""

module_registry: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Likewise a module's own children."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")

non_persistent_buffer_names: Callable[[nn.Module], Collection[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's own buffers that its `state_dict` leaves out: for a checkpoint that must warn of them."""


def remember_tensors(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what says, given these tensors again, that none has another dtype, device, shape, or `requires_grad`.

    One call in C++ for all of them, which the compiler makes before it runs a compiled function. It may also say no
    where nothing has changed but the strides, or autocast was switched.
    """
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


forward_pre_hooks: Callable[[nn.Module], Mapping[int, Any]] = attrgetter("_forward_pre_hooks")
"""A module's forward pre-hooks by number: for finding those of a wrapper that is gone."""

optimizer_step_pre_hooks: Callable[[Optimizer], Mapping[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
"""An optimizer's step pre-hooks by number: for finding the one guard that several trainers share."""


def forget_scaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Let a scaler forget what `unscale_` and `step` have noted of an optimizer; else `unscale_` fails next time."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


find_tensors: Callable[[Any], Iterable[Tensor]] = _find_tensors
"""The tensors in a module's output, found as torch's own DDP finds them (lists, dictionaries, dataclasses, RRefs)."""

warn_of_unequal_devices: Callable[[list[int]], None] = _check_balance
"""Warn of a GPU with much less memory or fewer cores than the others, as `torch.nn.DataParallel` does."""


def complete_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer whose class does not call `Optimizer.__init__` what that sets, as unpickling an old one does.

    Wrappers of another optimizer are such, Lookahead of torch_optimizer for one: they have no dictionaries of hooks.
    """
    vars(optimizer).setdefault("defaults", {})
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        Optimizer.__setstate__(optimizer, {})


def byte_view(tensor: Tensor) -> Tensor:
    """Return a dense tensor's bytes in row-major order, on the CPU; without a copy if they lie there so."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # One element of a strided view counts as contiguous and keeps its stride, with which torch gives no bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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


# Bound here: torch's tests may put another class in the place of that name.
check_comm_hook: Callable[..., None] = parallel.DistributedDataParallel._check_comm_hook
"""Check a communication hook's signature as torch's DDP does; KeyError if its second parameter is not `bucket`."""


def has_torchs_comm_hook(wrapper: parallel.DistributedDataParallel) -> bool:
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


def default_device_of_thread() -> torch.device | None:
    """Return what `with torch.device(...)` or `torch.set_default_device` set in this thread, as given; None without.

    The innermost counts, and what `set_default_device` set is the outermost.
    `torch.get_default_device` adds the current index, and does not tell the CPU from nothing.
    """
    modes = _get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


@cache
def has_kernel(operator: str, device_type: str) -> bool:
    """Return whether an operator such as "aten::batch_norm_stats" is implemented for devices of a type, such as "xpu".

    A plug-in for a device registers its kernels when it is imported, which is before the device has tensors.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def num_stored_elements(tensor: Tensor) -> int:
    return tensor._nnz()


storage_address: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""The address of torch's StorageImpl, the argument of `storage_use_count`; equal for all tensors that share memory.

Unlike `data_ptr()` it differs for two storages that are both empty, and stays the same when the storage is resized.
"""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and storage objects hold the StorageImpl at an address.

Each tensor counts once, and so do a view, a detached tensor, an array made by `numpy()`, and the storage object, of
which there is one at a time.
"""


def count_storage_users(tensors: Iterable[Tensor]) -> list[int]:
    """Return of each tensor how many tensors and storage objects hold its memory, the one made for this included."""
    return list(map(storage_use_count, map(storage_address, map(Tensor.untyped_storage, tensors))))


USUAL_STORAGE_USERS: Final = 2
"""What `count_storage_users` says of memory that one tensor alone has: that tensor, and the storage object."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor, or a view of it, was written in place.

Reading does not count, nor does writing through `.data` or to a detached NumPy array's memory. A view has its base's
counter; `.data` makes a tensor with a counter of its own.
"""

REFERENCES_OF_ONE_HOLDER: Final = 2
"""What `sys.getrefcount(slot.gradient)` says of a tensor that only the attribute of one Python object holds.

One is the attribute, one the argument. We rely on three things. The same Python object comes back each time from
`parameter.grad`. While a tensor is also held in C++, as `.grad` is, the count is one higher. When `.grad` is cleared it
falls back.
"""

foreach_add_ = torch._foreach_add_

foreach_div_ = torch._foreach_div_

foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
"""Return the norm of each tensor of a list; that of order infinity is not finite if a number is not."""

foreach_copy_ = torch._foreach_copy_
"""Copy to each tensor of a list its counterpart of a second list, as `copy_` does: strides and dtype may differ."""

flatten_dense: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors
"""Copy the elements of tensors of one dtype and device to one tensor with one dimension: `torch.cat` of their
`reshape(-1)`, in half the time where there are many.
"""

foreach_lerp_ = torch._foreach_lerp_
"""Move each tensor of a list in place towards its counterpart of a second list by a part of the way: with the bits of
`lerp_` with that number."""


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor of a list in place, with the bits of `mul_`.

    Given a number, torch's operation rounds it to the tensors' dtype first, on the CPU: 1/3 in bfloat16 is 0.2% too
    large. Given a tensor it does not.
    """
    torch._foreach_mul_(tensors, torch.tensor(factor, dtype=torch.float64))


def joins_uneven_inputs(wrapper: Any) -> bool:
    """Return whether an object of torch's wrapper is within `join`."""
    is_enabled: bool = wrapper._join_config.enable
    return is_enabled


def sync_module_buffers(wrapper: Any, source: int) -> None:
    """Let an object of torch's wrapper overwrite its buffers with those of a rank, as a subclass may do otherwise."""
    wrapper._sync_module_buffers(source)
