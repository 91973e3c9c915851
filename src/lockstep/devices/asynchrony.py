"""Whether the host runs ahead of a device."""

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Return whether operations on the device are queued, so that reading a value on the host waits for the device.

    Code that calls this, instead of comparing device types, can be tested with a fake asynchronous device on a CPU.
    """
    return device.type != "cpu"
