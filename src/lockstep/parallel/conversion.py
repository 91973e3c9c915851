"""Objects of torch's `DistributedDataParallel` become Lockstep's, for libraries that construct torch's class."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import parallel as torch_parallel

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.torch_names import arguments_from_torch
from lockstep.torch_private.modules import has_torchs_comm_hook, stop_torchs_reducer

_TORCHS: Any = torch_parallel.DistributedDataParallel
"""Bound now: `lockstep.drop_in` puts ours in its place."""


def convert_wrapper(wrapper: Any) -> DistributedDataParallel:
    """Make an object of torch's class one of Lockstep's, in place: other references to it remain right.

    Collective, as wrapping is. Call it before the first forward, and before `register_comm_hook`. An object of
    Lockstep's stays as it is.
    """
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper
    if type(wrapper) is not _TORCHS:
        raise TypeError(
            f"A {type(wrapper).__name__} cannot become lockstep.DistributedDataParallel, expected an object of torch's "
            "DistributedDataParallel. Wrap the module with lockstep.DistributedDataParallel instead. (LS324)"
        )
    state: Mapping[str, Any] = dict(vars(wrapper))
    if state["mixed_precision"] is not None:
        raise ValueError(
            "This DistributedDataParallel has mixed_precision, whose hooks would stay in the module. Wrap the module "
            "with lockstep.DistributedDataParallel(module, mixed_precision=...) instead. (LS324)"
        )
    if has_torchs_comm_hook(wrapper):
        raise ValueError(
            "This DistributedDataParallel has a communication hook already, which would be lost. Convert it before "
            "register_comm_hook. (LS309)"
        )
    stop_torchs_reducer(wrapper)
    converted: DistributedDataParallel = wrapper
    object.__setattr__(converted, "__class__", DistributedDataParallel)
    DistributedDataParallel.__init__(converted, wrapper.module, **arguments_from_torch(state))
    vars(converted).update({name: state[name] for name in vars(nn.Module()) if name in state})
    return converted
