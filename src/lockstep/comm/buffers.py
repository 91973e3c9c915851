"""Memory for tensors that a group reduces often."""

from contextlib import suppress
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.capabilities import OwnsMemory, capabilities_of
from lockstep.errors import GroupError


def allocate_buffer(num_elements: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Return a flat tensor of zeros that the group reduces with as few copies as it can (local)."""
    if device.type == "cpu" and capabilities_of(group).owns_memory:
        with suppress(GroupError):  # a rank is lost: the first call says so, unless the workers are replaced before
            return cast("OwnsMemory", group).allocate_tensor(num_elements, dtype=dtype, device=device)
    return torch.zeros(num_elements, dtype=dtype, device=device)
