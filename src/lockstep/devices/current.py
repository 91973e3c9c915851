"""The accelerator of this process: CUDA, XPU, or that of a plug-in, such as Ascend's NPU.

Code above this room goes through these functions, or through `torch.accelerator`, where it means "not the CPU".
"""

import socket

import torch


def current_accelerator() -> torch.device | None:
    """Return this process' current accelerator with its index; None where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def own_accelerator(local_rank: str | None) -> torch.device | None:
    """Return the current accelerator if no other worker has it, as far as its local rank shows; None otherwise."""
    found = current_accelerator()
    is_own = found is not None and (torch.accelerator.device_count() == 1 or local_rank == str(found.index))
    return found if is_own and local_rank else None


def take_gpu(local_rank: int) -> str:
    """Make the GPU with this worker's local rank the current device; return why that is impossible, or an empty text.

    A worker that sees one GPU uses that one, whatever its local rank: its launcher has set CUDA_VISIBLE_DEVICES. A
    worker that has used its accelerator already keeps its current device.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or torch.get_device_module(found).is_initialized():
        return ""
    num_gpus = torch.accelerator.device_count()
    if num_gpus == 1:
        return ""
    if local_rank >= num_gpus:
        return (
            f"Worker {local_rank} of host {socket.gethostname()!r} has no GPU of its own: {num_gpus} can be seen "
            "there. Start at most one worker per GPU on a host. (LS908)"
        )
    torch.accelerator.set_device_index(local_rank)
    return ""
