"""Take the inventory of this machine. This creates no CUDA context, so the launcher may do it."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pynvml

from lockstep.devices.choose import Placement, choose_devices
from lockstep.devices.inventory import (
    Gpu,
    Holder,
    Inventory,
    count_cores,
    measure_memory,
)
from lockstep.devices.nvml import NoGpusError, ask_driver, is_driver_installed, read_cuda_version, read_gpus
from lockstep.devices.request import DeviceRequest, Request
from lockstep.errors import DeviceError, counted
from lockstep.settings import VISIBLE_VARIABLES, VisibleDevices, read_settings

_UUID_KINDS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


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


def take_inventory() -> Inventory:
    """Return what this machine has."""
    visible = read_settings().visible_devices()
    torch_problem = _find_torch_problem()
    driver, is_faulty = None, False
    try:
        gpus, driver = read_gpus(pynvml)
        gpus = assign_own(gpus, measure_own_memory(), os.getpid())
        problem = torch_problem if gpus else "the NVIDIA driver sees no GPU"
        gpus = _mark_visible(gpus, visible)
        if gpus and not problem:
            problem = _find_old_driver()
            is_faulty = bool(problem)
    except NoGpusError as error:
        gpus = () if torch_problem or not _can_have_driver() else _read_by_torch(visible.devices)
        problem = "" if gpus else str(error)
        is_faulty = error.is_fault and not gpus
    if problem and (others := _read_other_accelerators()):
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


def _find_old_driver() -> str:
    """Return in words that the driver knows only an older CUDA than the one for which torch was built; else empty.

    A driver runs what was built for any minor version of the CUDA that it knows, and for older ones.
    """
    built, known = _torch_build().get("cuda"), read_cuda_version(pynvml)
    if not built or known is None or known[0] >= int(built.split(".")[0]):
        return ""
    version = _torch_build()["__version__"].partition("+")[0]
    return (
        f"the NVIDIA driver runs CUDA up to {known[0]}.{known[1]}, and this torch was built for CUDA {built}: update "
        f"the driver, or install torch for it: pip install torch=={version} --index-url "
        f"https://download.pytorch.org/whl/cu{known[0]}{known[1]} (or the newest below that)"
    )


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
    if "torch" in sys.modules:
        build: dict[str, Any] = vars(sys.modules["torch"].version)
        return build
    found = importlib.util.find_spec("torch")
    return {} if found is None else runpy.run_path(str(Path(str(found.origin)).with_name("version.py")))


def _mark_visible(gpus: tuple[Gpu, ...], visible: VisibleDevices) -> tuple[Gpu, ...]:
    if visible.devices is None:
        return gpus
    uuids = ask_driver() if needs_driver(visible.devices, visible.order, gpus) else None
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


def assign_own(gpus: tuple[Gpu, ...], own: Mapping[str, int], pid: int) -> tuple[Gpu, ...]:
    """Return the GPUs with this process among the holders of those that it uses; `own` is from `measure_own_memory`.

    Where the driver reports other process ids than those that are seen here ([Note: pids of the driver] in
    `inventory.py`), this process' own memory looks like that of another process.
    """
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


def needs_driver(variable: str, order: str | None, gpus: Sequence[Gpu]) -> bool:
    """Return whether only the driver can tell which GPUs CUDA_VISIBLE_DEVICES, `variable`, shows.

    It has either UUIDs (or their beginnings) or numbers. CUDA stops at the first entry that it cannot read or that does
    not exist, and shows no GPU if an entry appears twice. Numbers count in CUDA's own order. That is the fastest card
    first unless `order`, CUDA_DEVICE_ORDER, is PCI_BUS_ID, so it may differ from the order of nvidia-smi, and only the
    driver has it (`ask_driver`). It also knows which MIG instance is the first of a GPU that is named.
    """
    if any(gpu.instance is not None for gpu in gpus):
        return variable.startswith("GPU-") or bool(_read_numbers(variable))
    return bool(_read_numbers(variable)) and order != "PCI_BUS_ID" and len(gpus) > 1


def find_visible(variable: str, gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    """Return the GPUs that the variable shows, if its numbers are those of nvidia-smi."""
    if variable.startswith(_UUID_KINDS):
        return _find_by_uuid(variable, gpus)
    numbers = _read_numbers(variable)
    known = {gpu.index for gpu in gpus}
    shown = set(_until(numbers, known))
    return frozenset(gpu for gpu in gpus if gpu.index in shown)


def find_by_bytes(uuids: Collection[str], gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    """Return the GPUs with these UUIDs, which the driver returned as hexadecimal digits of their bytes."""
    return frozenset(gpu for gpu in gpus if gpu.uuid is not None and uuid_digits(gpu.uuid) in uuids)


def _find_by_uuid(variable: str, gpus: Sequence[Gpu]) -> frozenset[Gpu]:
    kind = variable[: len(_UUID_KINDS[0])]
    shown: list[Gpu] = []
    for entry in variable.split(","):
        found = [gpu for gpu in gpus if (gpu.uuid or "").startswith(entry)]
        if not entry.startswith(kind) or len(found) != 1:
            break
        shown.append(found[0])
    return frozenset(shown if len(set(shown)) == len(shown) else ())


def _read_numbers(variable: str) -> list[int]:
    numbers: list[int] = []
    for entry in variable.split(","):
        match = _NUMBER.match(entry.strip())  # CUDA reads "1st" as 1
        if match is None or int(match[0]) < 0:
            break
        if int(match[0]) in numbers:
            return []
        numbers.append(int(match[0]))
    return numbers


def _until(numbers: Sequence[int], known: Collection[int]) -> list[int]:
    end = next((index for index, number in enumerate(numbers) if number not in known), len(numbers))
    return list(numbers[:end])


def uuid_digits(uuid: str) -> str:
    """Return the hexadecimal digits of a UUID, without "GPU-" or "MIG-"."""
    kind = next((kind for kind in _UUID_KINDS if uuid.startswith(kind)), "")
    return uuid.removeprefix(kind).replace("-", "").lower()
