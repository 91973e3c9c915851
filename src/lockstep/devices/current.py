"""The GPU of a worker that a launcher has started among others on its host."""

import socket

import torch


def take_gpu(local_rank: int) -> str:
    """Make the GPU with this worker's number on its host the current device; return why that cannot be, or nothing.

    A worker that sees one GPU has that one, whatever its number: its launcher has shown each its own. One that has used
    CUDA already has chosen for itself.
    """
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        return ""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        return ""
    if local_rank >= num_gpus:
        return (
            f"Worker {local_rank} of host {socket.gethostname()!r} has no GPU of its own: {num_gpus} can be seen "
            "there. Start as many workers on a host as it has GPUs."
        )
    torch.cuda.set_device(local_rank)
    return ""
