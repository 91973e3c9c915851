"""The GPU memory of this process itself.

Where the driver reports other process ids than those that are seen here ([Note: pids of the driver] in `holders.py`),
this process' own memory looks like that of another process. `assign_own` is pure.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

from lockstep.devices.inventory import Gpu, Holder
from lockstep.devices.visible import uuid_digits


def measure_own_memory() -> dict[str, int]:
    """Return how much memory this process has on each GPU that it has used, by the digits of its UUID.

    This initializes nothing: without torch, or before CUDA is initialized, there is none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    indices = range(torch.cuda.device_count())
    return {
        uuid_digits(str(torch.cuda.get_device_properties(index).uuid)): torch.cuda.memory_reserved(index)
        for index in indices
        if torch.cuda.max_memory_reserved(index)  # else it may have no memory there at all
    }


def assign_own(gpus: tuple[Gpu, ...], own: Mapping[str, int], pid: int) -> tuple[Gpu, ...]:
    """Return the GPUs with this process among the holders of those that it uses; `own` is from `measure_own_memory`."""
    return tuple(_with_own(gpu, own, pid) for gpu in gpus)


def _with_own(gpu: Gpu, own: Mapping[str, int], pid: int) -> Gpu:
    size = None if gpu.uuid is None else own.get(uuid_digits(gpu.uuid))
    if size is None or any(holder.is_self for holder in gpu.holders):
        return gpu
    unknown = [holder for holder in gpu.holders if holder.user is None and not holder.is_graphics]
    if not unknown:  # the driver lists only processes of another namespace, or none
        own_holder = Holder(pid=pid, user=None, command=None, since=None, memory_bytes=size, is_self=True)
        return replace(gpu, holders=(*gpu.holders, own_holder))
    # One of them is this process. The driver counts the CUDA context too, so it reports a little more than torch.
    nearest = min(unknown, key=lambda holder: abs((holder.memory_bytes or size) - size))
    found = (replace(holder, is_self=True) if holder is nearest else holder for holder in gpu.holders)
    return replace(gpu, holders=tuple(found))
