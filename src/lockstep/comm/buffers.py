"""What a group over shared memory can do for what travels often."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.shm.group import ShmProcessGroup


def allocate_buffer(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a flat tensor of zeros that the group reduces with as few copies as it can (local).

    Args:
        num_elements: Its length.
        dtype: Its dtype.
        device: Where it lies.
        group: The group that will reduce it; a group over shared memory gives memory of its own.
    """
    if isinstance(group, ShmProcessGroup) and group.supports_tensor_alloc(device):
        return group.allocate_tensor(num_elements, dtype=dtype, device=device)
    return torch.zeros(num_elements, dtype=dtype, device=device)


def runs_in_callers_thread(group: ProcessGroup) -> bool:
    """Return whether a blocking call of the group is run by the thread that makes it, after those before it (local)."""
    return isinstance(group, ShmProcessGroup)
