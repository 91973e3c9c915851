"""Take the inventory of this machine. This creates no CUDA context, so the launcher may do it."""

import importlib.metadata
import importlib.util
import os
import platform
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml

from lockstep.devices.capacity import count_cores, measure_memory
from lockstep.devices.choose import choose_devices
from lockstep.devices.driver import ask_driver, is_driver_installed
from lockstep.devices.holders import look_up_holder, read_process_ids
from lockstep.devices.inventory import Gpu, Inventory
from lockstep.devices.nvml import NoGpusError, read_gpus
from lockstep.devices.own_memory import assign_own, measure_own_memory
from lockstep.devices.placement import Placement
from lockstep.devices.request import DeviceRequest, Request
from lockstep.devices.visible import find_by_bytes, find_visible, needs_driver
from lockstep.errors import DeviceError, counted
from lockstep.settings import VISIBLE_VARIABLES, VisibleDevices, read_settings

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def take_inventory(
    nvml: ModuleType = pynvml,
    visible: VisibleDevices | None = None,
    ask: Callable[[], frozenset[str] | None] = ask_driver,
    torch_problem: str | None = None,
    measure_own: Callable[[], Mapping[str, int]] = measure_own_memory,
    read_others: Callable[[], tuple[Gpu, ...]] | None = None,
) -> Inventory:
    """Return what this machine has. What is None is found out; an empty `torch_problem`: torch can use GPUs."""
    visible = read_settings().visible_devices() if visible is None else visible
    torch_problem = _find_torch_problem() if torch_problem is None else torch_problem
    driver, is_faulty = None, False
    try:
        gpus, driver = read_gpus(nvml, partial(look_up_holder, process_ids=read_process_ids()))
        gpus = assign_own(gpus, measure_own(), os.getpid())
        problem = torch_problem if gpus else "the NVIDIA driver sees no GPU"
        gpus = _mark_visible(gpus, visible, ask)
    except NoGpusError as error:
        gpus = () if torch_problem or not _can_have_driver() else _read_by_torch(visible.devices)
        problem = "" if gpus else str(error)
        is_faulty = error.is_fault and not gpus
    if problem and (others := (read_others or _read_other_accelerators)()):
        gpus, problem, is_faulty = others, "", False
    total, available = measure_memory()
    return Inventory(
        taken_at=datetime.now().astimezone(),
        gpus=gpus,
        problem=problem,
        is_faulty=is_faulty,
        driver=driver,
        cuda_visible_devices=visible.devices,
        num_cores=count_cores(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        is_wsl="microsoft" in platform.release().lower(),
        nccl_version=_read_nccl_version(),
    )


def place_workers(
    request: DeviceRequest | Request | Placement,
    *,
    workers: int | None = None,
    force: bool = False,
    max_workers: int | None = None,
) -> Placement:
    """Take the inventory and choose devices, see `choose_devices`; a placement is returned as it is."""
    if isinstance(request, Placement):
        num_workers = len(request.devices)
        if workers not in {None, num_workers}:
            placed = counted(num_workers, "worker")
            raise DeviceError(f"devices is a placement of {placed}, but workers is {workers}. Give only one. (LS905)")
        return request
    return choose_devices(request, workers=workers, inventory=take_inventory(), force=force, max_workers=max_workers)


def _find_torch_problem() -> str:
    """Return why torch can use no GPU, if it is built for the CPU. This does not import torch, which takes a second."""
    build = _torch_build()
    if build.get("cuda", "") is None and build.get("hip", "") is None:
        return f"this torch ({build['__version__']}) is built without CUDA"
    return ""


def _can_have_driver() -> bool:
    """Return whether torch may use a GPU without NVML: one of AMD, or with the driver of CUDA alone.

    What pip installs is built for CUDA on machines without any GPU too, whose scripts would wait for torch's import.
    """
    return _torch_build().get("hip") is not None or is_driver_installed()


def _read_nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that torch's packages bring; empty if it is not known. This does not import torch."""
    for package in _NCCL_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers = importlib.metadata.version(package).split(".")
            return tuple(int(number) for number in numbers if number.isdecimal())
    return ()


def _torch_build() -> dict[str, Any]:
    """Return the variables of the module `torch.version`."""
    if "torch" in sys.modules:
        build: dict[str, Any] = vars(sys.modules["torch"].version)
        return build
    found = importlib.util.find_spec("torch")
    return {} if found is None else runpy.run_path(str(Path(str(found.origin)).with_name("version.py")))


def _mark_visible(
    gpus: tuple[Gpu, ...], visible: VisibleDevices, ask: Callable[[], frozenset[str] | None]
) -> tuple[Gpu, ...]:
    if visible.devices is None:
        return gpus
    uuids = ask() if needs_driver(visible.devices, visible.order, gpus) else None
    shown = find_visible(visible.devices, gpus) if uuids is None else find_by_bytes(uuids, gpus)
    return tuple(replace(gpu, is_visible=gpu in shown) for gpu in gpus)


def _read_by_torch(variable: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees where there is no NVML, as for AMD's GPUs: only their numbers are known."""
    import torch

    return _number_gpus("cuda", "unknown", torch.cuda.device_count(), variable)


def _read_other_accelerators() -> tuple[Gpu, ...]:
    """Return the GPUs of Intel, or the NPUs of Ascend, that torch sees; it is imported only if it is made for them."""
    if _torch_build().get("xpu") is None and importlib.util.find_spec("torch_npu") is None:
        return ()
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type not in VISIBLE_VARIABLES:
        return ()
    shown = read_settings().visible_numbers(found.type)
    return _number_gpus(found.type, f"{found.type.upper()} device", torch.accelerator.device_count(), shown)


def _number_gpus(kind: str, name: str, num_gpus: int, variable: str | None) -> tuple[Gpu, ...]:
    # torch counts only the GPUs that the variable shows. A worker's variable must use the same names for them.
    names = [str(index) for index in range(num_gpus)] if variable is None else variable.split(",")
    return tuple(
        Gpu(
            index=index,
            uuid=None,
            cuda_name=in_variable.strip(),
            name=name,
            memory_total_bytes=None,
            memory_free_bytes=None,
            kind=kind,
        )
        for index, in_variable in zip(range(num_gpus), names, strict=False)
    )
