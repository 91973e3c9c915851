"""Devices: which GPUs this machine has, and which device each worker gets.

An *inventory* lists what the machine has at a moment: GPUs, the processes that use them (*holders*), cores. A *request*
is what a user asks for: `auto:3`, `[0, 2]`. A *placement* has one device per worker, in rank order, and the reason for
the choice.

Pure are the parts that read a request and choose devices: `request.py` and `choose.py`, with the values of
`inventory.py`. `look.py` takes the inventory. It uses `nvml.py`.

Invariants: taking an inventory creates no CUDA context. Every GPU that the user names exists, is named once, is not
hidden from this process and is not used by another process; otherwise `DeviceError` is raised. The CPU replaces GPUs
only if the request is `auto` and there is no GPU that this process could ever use.

`lockstep run` chooses devices without torch. So `transfer.py`, which imports torch, is not imported here.
"""

from lockstep.devices.choose import Device, Placement, choose_devices
from lockstep.devices.inventory import Gpu, Holder, Inventory, count_cores
from lockstep.devices.look import place_workers, take_inventory
from lockstep.devices.request import DeviceRequest, Request, parse_request, resized

__all__ = [
    "Device",
    "DeviceRequest",
    "Gpu",
    "Holder",
    "Inventory",
    "Placement",
    "Request",
    "choose_devices",
    "count_cores",
    "parse_request",
    "place_workers",
    "resized",
    "take_inventory",
]
