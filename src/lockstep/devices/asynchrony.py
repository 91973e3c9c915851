"""Whether the host runs ahead of a device."""

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Return whether operations on the device are queued, so that reading a value on the host waits for the device.

    Code that asks this, instead of comparing device types, can be tested on a CPU that behaves so.
    """
    return device.type != "cpu"
