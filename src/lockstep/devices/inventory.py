"""What this machine has. Looking creates no CUDA context, so the launcher may look."""

from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""What is there where a driver of NVIDIA, of AMD, or Windows' own is."""


def count_gpus() -> int:
    """Return how many CUDA devices this process may use; 0 without a driver or a CUDA build of torch."""
    if not any(driver.exists() for driver in _DRIVERS):
        return 0
    import torch  # a second of importing, where a script is to be started on the CPU

    return torch.cuda.device_count()
