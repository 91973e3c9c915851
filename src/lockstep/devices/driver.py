"""Ask the CUDA driver which GPUs it shows to this process.

A separate process asks it, because the first call to the driver fixes the value of CUDA_VISIBLE_DEVICES for the process
that calls, and makes CUDA unusable in its later forks. No CUDA context is created.
"""

import ctypes
import subprocess
import sys

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


def is_driver_installed() -> bool:
    """Return whether the library of the CUDA driver can be loaded; it is not called."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def ask_driver() -> frozenset[str] | None:
    """Return the UUIDs of the GPUs that CUDA shows, as hexadecimal digits of their bytes; None if the call fails."""
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(done.stdout.split()) if done.returncode == 0 else None
