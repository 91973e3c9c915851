"""Choosing the GPU of a worker by its local rank."""

import socket

import torch


def take_gpu(local_rank: int) -> str:
    """Make the GPU with this worker's local rank the current device; return why that is impossible, or an empty text.

    A worker that sees one GPU uses that one, whatever its local rank: its launcher has set CUDA_VISIBLE_DEVICES. A
    worker that has used CUDA already keeps its current device.
    """
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        return ""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        return ""
    if local_rank >= num_gpus:
        return (
            f"Worker {local_rank} of host {socket.gethostname()!r} has no GPU of its own: {num_gpus} can be seen "
            "there. Start at most one worker per GPU on a host."
        )
    torch.cuda.set_device(local_rank)
    return ""
