"""What this machine has. Looking creates no CUDA context, so the launcher may look."""

import torch


def count_gpus() -> int:
    """Return how many CUDA devices this process may use; 0 without a driver or a CUDA build of torch."""
    return torch.cuda.device_count()
