"""The backend "shm" of torch.distributed: `init_process_group("shm")`, `new_group(backend="shm")`."""

import warnings
from typing import Any

import torch.distributed as dist

from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.rendezvous import Apart, meet


def register() -> None:
    """Make torch.distributed know the backend "shm"; doing so again changes nothing."""
    if dist.is_available() and not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", create_group, extended_api=True, devices=["cpu"])


def create_group(options: Any, _: Any = None) -> Any:
    """Make a group (collective over its ranks); called by torch, which takes a group or a backend for one.

    Args:
        options: What torch tells a backend: store, rank, size, timeout.

    Raises:
        GroupError: Some rank did not come in time.
        PeerLostError: A rank came and was lost before all had met.
    """
    layout = Layout(options.group_size)
    meeting = meet(options.store, options.group_rank, layout, options.timeout)
    if isinstance(meeting, Apart):
        if options.group_rank == 0:
            warnings.warn(f"The shm backend uses Gloo: {meeting.reason}.", stacklevel=2)
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return ShmProcessGroup(options.store, options.group_rank, meeting, layout, options.timeout)
