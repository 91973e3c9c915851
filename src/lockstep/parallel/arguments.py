"""Checks of the arguments of `DistributedDataParallel`: torch's, with its messages, and those that we add.

And what goes into a forward: how many samples it has, and in which precision it runs.
"""

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.rnn import PackedSequence

from lockstep.comm import World, current_world
from lockstep.errors import GroupError
from lockstep.parallel.sync_batchnorm import SyncBatchNorm
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.reduce import BucketLimits
from lockstep.torch_private.modules import (
    TorchsSyncBatchNorm,
    set_precision_attributes,
    tree_leaves,
    tree_map_only,
)

_LOGGER = logging.getLogger("lockstep")
_MIB = 1 << 20
_SCALAR = -1
"""Stands for the first dimension of a tensor that has none."""


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules. (LS301)"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            "gradient. (LS301)"
        )


def find_placement(
    parameters: Sequence[nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[tuple[torch.device, ...], list[int] | None, int | None]:
    """Return the devices of the parameters, in the order in which they first come, and torch's two attributes."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element. (LS302)")
    devices = tuple(dict.fromkeys(parameter.device for parameter in parameters))
    if device_ids and devices[0].type != "cpu" and len(devices) == 1:
        only = _index(device_ids[0])
        output = only if output_device is None else _index(output_device)
        return devices, [only], output
    if device_ids or output_device is not None:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
            f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {set(devices)}. Leave both out for a module on the CPU or on "
            "several devices. (LS302)"
        )
    return devices, None, None


def find_world(process_group: ProcessGroup | None, device_mesh: Any) -> tuple[World, ProcessGroup]:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. (LS303)")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}. (LS303)")
        process_group = device_mesh.get_group(mesh_dim=0)
    world = current_world(process_group)
    if world.group is None:
        raise GroupError(
            "DistributedDataParallel needs a process group, and this process has none. "
            "Call ls.init_process_group() first, or start the function with ls.launch. (LS127)"
        )
    return world, world.group


def find_limits(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> BucketLimits:
    caps = list(bucket_cap_mb_list or ([] if bucket_cap_mb is None else [bucket_cap_mb]))
    for cap in caps:
        if cap <= 0:
            raise ValueError(f"A bucket's size is {cap} MiB, expected a number above zero. (LS303)")
    return BucketLimits(sizes_bytes=tuple(max(int(cap * _MIB), 1) for cap in caps)) if caps else BucketLimits()


def find_buffer_syncs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    if broadcast_buffers is not None:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which unlike it leaves the "
            "broadcast at construction as it is. (LS325)"
            if forward_sync_buffers is None
            else "Both `broadcast_buffers` and `forward_sync_buffers` were specified; `broadcast_buffers` is "
            "deprecated and ignored then. (LS325)"
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel_of_user())
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    both = broadcast_buffers is not False
    return both, both


def reduce_dtype(mixed_precision: Any) -> torch.dtype | None:
    """Return the dtype in which gradients are reduced, by torch's `_MixedPrecision`; None for that of the gradients."""
    if mixed_precision is None:
        return None
    dtype: torch.dtype | None = mixed_precision.reduce_dtype or mixed_precision.param_dtype
    return dtype


def refuse_sync_batch_norm_on_cpu(module: nn.Module, device: torch.device) -> None:
    torchs = (each for each in module.modules() if isinstance(each, TorchsSyncBatchNorm))
    if device.type == "cpu" and not all(isinstance(each, SyncBatchNorm) for each in torchs):
        raise ValueError(
            "SyncBatchNorm layers only work with GPU modules, as torch has them. Use lockstep.SyncBatchNorm."
            "convert_sync_batchnorm(module), which works on the CPU as well. (LS331)"
        )


def warn_of_ignored(
    *,
    check_reduction: bool = False,
    mixed_precision: Any = None,
    is_static_again: bool = False,
    finds_unused: bool = False,
) -> None:
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
            "Please avoid using it. (LS325)",
            FutureWarning,
            stacklevel=stacklevel_of_user(),
        )
    if mixed_precision is not None:
        _LOGGER.warning("Received mixed precision config %s", mixed_precision)
    if is_static_again:
        warnings.warn(
            "You've set static_graph to be True, no need to set it again. (LS325)", stacklevel=stacklevel_of_user()
        )
    elif finds_unused:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically, so you do not need to set find_unused_parameters=true. (LS325)",
            stacklevel=stacklevel_of_user(),
        )


def _index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def puts_time_first(module: nn.Module) -> bool:
    """Return whether a layer of `module` expects sequences whose first dimension is time, as torch's do by default."""
    layers = (each for each in module.modules() if isinstance(each, nn.RNNBase | nn.MultiheadAttention))
    return any(not layer.batch_first for layer in layers)


def count_samples(arguments: Any, output: Any, *, time_first: bool) -> int:
    """Return how many samples a forward was given, or 0 if that cannot be known.

    It is known if all tensors among the arguments begin with the same dimension, and one of the outputs with it too or
    is a single number; and of packed sequences, which alone tell if the first dimension may be time (`time_first`).
    """
    given, returned = _leaves(arguments), _leaves(output)
    if time_first and not all(isinstance(leaf, PackedSequence) for leaf in given):
        return 0
    sizes = set(map(_count, given)) - {_SCALAR}
    if len(sizes) != 1:
        return 0
    (size,) = sizes
    return size if any(_count(leaf) in (size, _SCALAR) for leaf in returned) else 0


def _leaves(values: Any) -> list[Any]:
    if type(values) is Tensor:
        return [values]
    if type(values) is list and all(type(value) is Tensor for value in values):
        return values
    leaves = tree_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | PackedSequence)]


def _count(value: Any) -> int:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return value.shape[0] if value.dim() > 0 else _SCALAR


def call_in_precision(
    module: nn.Module,
    mixed_precision: Any,
    ignored: Iterable[str],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `module` with parameters cast, as a part of the graph, to `param_dtype`; they themselves stay as they are."""
    dtype = getattr(mixed_precision, "param_dtype", None)
    if dtype is None:
        return module(*inputs, **kwargs)
    left_alone = set(ignored)
    cast = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if name not in left_alone and parameter.is_floating_point()
    }
    return functional_call(module, cast, cast_floats(inputs, dtype), cast_floats(kwargs, dtype))


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def prepare_precisions(module: nn.Module, mixed_precision: Any, ignored: Iterable[str]) -> None:
    """Name what parameters are in either precision, and cast buffers in place, if there is a mixed precision."""
    left_alone = set(ignored)
    param_dtype: Any = getattr(mixed_precision, "param_dtype", None)
    for name, parameter in module.named_parameters() if param_dtype is not None else ():
        if name not in left_alone:
            set_precision_attributes(parameter, param_dtype)
    buffer_dtype = getattr(mixed_precision, "buffer_dtype", None)
    for name, buffer in module.named_buffers() if buffer_dtype is not None else ():
        if name not in left_alone and buffer.is_floating_point():
            buffer.data = buffer.to(buffer_dtype)
