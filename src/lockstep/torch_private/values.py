"""Nested values, dispatch modes, kernels of devices, and where new tensors go by default."""

from functools import cache

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "TorchDispatchMode",
    "default_device_of_thread",
    "has_kernel",
    "num_stored_elements",
    "tree_leaves",
    "tree_map_only",
]
# tree_leaves and tree_map_only are the walk that torch itself uses over nested values: lists, tuples, named tuples,
# dictionaries, and classes that libraries have registered (`ModelOutput` of transformers).
# TorchDispatchMode sees every operation within, after autograd.


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
    """Return how many elements a sparse tensor, of whatever layout, has stored."""
    return tensor._nnz()
