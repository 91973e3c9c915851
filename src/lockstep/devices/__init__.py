"""Devices: what this machine has, and which of it each worker gets.

A *placement* is one device name per worker, in rank order: `("cuda:0", "cuda:2")` or `("cpu", "cpu")`.
Choosing is pure (`choose.py`); looking is not (`inventory.py`).

Invariants: looking creates no CUDA context; a device asked for is there and is asked for once, or the answer is
one `DeviceError`; nothing falls back from a GPU to the CPU unless the request says `auto` and there is no GPU.

`lockstep run` chooses devices without torch, so `transfer.py`, which needs it, is imported by who moves tensors.
"""

from lockstep.devices.choose import DeviceRequest, choose_devices
from lockstep.devices.inventory import count_gpus

__all__ = ["DeviceRequest", "choose_devices", "count_gpus"]
