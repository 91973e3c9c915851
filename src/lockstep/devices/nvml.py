"""Look at NVIDIA's GPUs through NVML, and ask the CUDA driver which it shows. Neither creates a CUDA context.

Values that a card does not support, or does not show to this user, are None; the rest is still reported.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lockstep.devices.inventory import Gpu, Holder, look_up_holder

_TIMEOUT_SECONDS = 20.0
_SCRIPT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
status = cuda.cuInit(0)
if status == 100:  # no device: the variable shows none
    sys.exit(0)
count = ctypes.c_int()
if status or cuda.cuDeviceGetCount(ctypes.byref(count)):
    sys.exit(1)
read = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid  # the first knows MIG instances
for number in range(count.value):
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    if cuda.cuDeviceGet(ctypes.byref(device), number) or read(uuid, device):
        sys.exit(1)
    print(uuid.raw.hex())
"""


class NoGpusError(Exception):
    """NVML cannot be used: the text ends a sentence. `is_fault`: it can be repaired; False without GPUs."""

    def __init__(self, message: str, *, is_fault: bool) -> None:
        super().__init__(message)
        self.is_fault = is_fault


def read_gpus(nvml: ModuleType) -> tuple[tuple[Gpu, ...], str | None]:
    """Return all GPUs, in PCI order, and the version of the driver; `NoGpusError` if it is absent, or a call fails."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _explain(nvml, error) from error
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        gpus = [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _read_index(nvml, index)]
    except nvml.NVMLError as error:
        raise _explain(nvml, error) from error
    finally:
        nvml.nvmlShutdown()
    return tuple(gpus), driver


def read_cuda_version(nvml: ModuleType) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, as (major, minor); None if it does not say."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        number = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    finally:
        nvml.nvmlShutdown()
    return None if number is None else (number // 1000, number % 1000 // 10)


def _explain(nvml: ModuleType, error: Any) -> NoGpusError:
    absent = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed here",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded here",
    }
    if error.value in absent:
        return NoGpusError(absent[error.value], is_fault=False)
    faults = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated but the old one still runs: reboot",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not use the NVIDIA driver: see the rights of /dev/nvidia*",
    }
    return NoGpusError(faults.get(error.value, f"the NVIDIA driver does not answer: {error}"), is_fault=True)


def _read_index(nvml: ModuleType, index: int) -> Iterator[Gpu]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_instances(nvml, handle))
        if instances or _is_split(nvml, handle):
            for number, instance in instances:
                yield _read_gpu(nvml, instance, index=index, instance=number)
        else:
            yield _read_gpu(nvml, handle, index=index, instance=None)
    except nvml.NVMLError as error:  # lost: it fell off the bus, or waits to be reset
        yield Gpu(
            index=index,
            uuid=None,
            cuda_name=str(index),
            name="unknown",
            memory_total_bytes=None,
            memory_free_bytes=None,
            problem=f"the driver reports {str(error)!r}",
        )


def _is_split(nvml: ModuleType, handle: Any) -> bool:
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE


def _instances(nvml: ModuleType, handle: Any) -> Iterator[tuple[int, Any]]:
    if _is_split(nvml, handle):
        for number in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if instance is not None:
                yield number, instance


def _read_gpu(nvml: ModuleType, handle: Any, *, index: int, instance: int | None) -> Gpu:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    load = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    uuid = _ask(nvml, nvml.nvmlDeviceGetUUID, handle)
    is_prohibited = _ask(nvml, nvml.nvmlDeviceGetComputeMode, handle) == nvml.NVML_COMPUTEMODE_PROHIBITED
    return Gpu(
        index=index,
        instance=instance,
        uuid=uuid,
        cuda_name=uuid or str(index),
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or "unknown",
        memory_total_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.free,
        utilisation_percent=None if load is None else load.gpu,
        holders=tuple(_read_holders(nvml, handle)),
        problem="its compute mode is Prohibited (`nvidia-smi -c`)" if is_prohibited else "",
    )


def _read_holders(nvml: ModuleType, handle: Any) -> Iterator[Holder]:
    computing = _processes(
        nvml, handle, nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetComputeRunningProcesses_v2
    )
    drawing = _processes(
        nvml, handle, nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, nvml.nvmlDeviceGetGraphicsRunningProcesses_v2
    )
    # A process may be in both lists, with all its memory in each.
    for pid, memory_bytes in {**drawing, **computing}.items():
        yield look_up_holder(pid, memory_bytes=memory_bytes, is_graphics=pid not in computing)


def _processes(nvml: ModuleType, handle: Any, *functions: Callable[[Any], Any]) -> dict[int, int | None]:
    """Return pids and their memory, from the first of these functions that this driver has."""
    answers = (_ask(nvml, function, handle) for function in functions)
    found: list[Any] = next((answer for answer in answers if answer is not None), [])
    return {process.pid: process.usedGpuMemory for process in found}


def _ask(nvml: ModuleType, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML call, or None if the card or driver has none; raise if the card is lost."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED}:
            raise
        return None


def is_driver_installed() -> bool:
    """Return whether the library of the CUDA driver can be loaded; it is not called."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def ask_driver() -> frozenset[str] | None:
    """Return the UUIDs of the GPUs that CUDA shows, as hexadecimal digits of their bytes; None if the call fails.

    A separate process asks, because the first call to the driver fixes the value of CUDA_VISIBLE_DEVICES for the
    process that calls, and makes CUDA unusable in its later forks.
    """
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(done.stdout.split()) if done.returncode == 0 else None
