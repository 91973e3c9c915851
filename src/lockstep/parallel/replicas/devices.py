"""Which devices replicas live on: what users may write, and what is kept.

torch's `device_ids` are numbers of GPUs, and scripts use them as such (`f"cuda:{model.device_ids[0]}"`). So an
accelerator stays a number here; the CPU, which torch's DataParallel does not know, is `torch.device("cpu")`.
"""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch

from lockstep.errors import DeviceError

DeviceId = SupportsIndex | str | torch.device | torch.cuda.device | torch.xpu.device
"""An accelerator's number, or a device or its name; -1 is the CPU, as in torch's functional form.

`torch.cuda.device(1)`, a context manager, means device 1 here; torch's DataParallel takes it for the current device.
"""

_CPU = torch.device("cpu")


def visible_ids() -> list[DeviceId]:
    """Return the numbers of all accelerators that this process may use; none where torch's DataParallel uses none."""
    if not torch.accelerator.is_available() or _accelerator_type() == "mps":
        return []
    return list(range(torch.accelerator.device_count()))


def as_device(device_id: DeviceId) -> torch.device:
    """Return the device that an entry of `device_ids`, or an `output_device`, means."""
    if isinstance(device_id, torch.cuda.device | torch.xpu.device):
        device_id = f"{'cuda' if isinstance(device_id, torch.cuda.device) else 'xpu'}:{device_id.idx}"
    if isinstance(device_id, bool) or not isinstance(device_id, SupportsIndex | str | torch.device):
        raise TypeError(
            f"{device_id!r} names no device. Say the number of a GPU, a torch.device or a name such as "
            '"cuda:1" or "cpu". (LS351)'
        )
    if isinstance(device_id, SupportsIndex):
        device_id = operator.index(device_id)
    if device_id == -1:
        return _CPU
    kind = _accelerator_type()
    number = device_id if isinstance(device_id, int) else 0
    device = torch.device(kind or "cuda", max(number, 0)) if isinstance(device_id, int) else torch.device(device_id)
    if device.type == "cpu":
        return _CPU
    index: int | None = device.index
    if index is None and kind is not None and device.type == kind:
        device = torch.device(kind, torch.accelerator.current_device_index())
    here = torch.accelerator.device_count() if kind else 0
    if device.type != kind or device.index >= here or number < 0:
        seen = f"{here} of {kind}" if kind else "no accelerator"
        raise DeviceError(
            f"A replica or its output is to be on device {device_id!r}, but {seen} can be seen here. "
            'Leave device_ids out to use what is here, or name the CPU, once per replica: ["cpu", "cpu"]. (LS351)'
        )
    return device


def as_id(device: torch.device) -> int | torch.device:
    """Return how a device stands in the attributes: a number for an accelerator, the device for the CPU."""
    return device if device.type == "cpu" else device.index


def as_ids(device_ids: Sequence[DeviceId]) -> list[DeviceId]:
    """Return `device_ids` in the form in which they are kept."""
    return [as_id(as_device(device_id)) for device_id in device_ids]


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type
