"""Several workers on one GPU, which NCCL and `launch` refuse: they are CPU workers that can see it."""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.devices import Device, Placement

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CYCLES_PER_MILLISECOND = 2_000_000


def on_one_gpu(num_workers: int) -> Placement:
    device = Device(name="cpu", visible="0", label="GPU 0, shared")
    return Placement(devices=(device,) * num_workers, reason="shared by all workers")


def join_over_gloo(run: ls.Run) -> None:
    """Make Gloo the default group of a worker, which moves tensors of either device (collective)."""
    store = dist.PrefixStore("on the GPU", dist.distributed_c10d._get_default_store())
    ls.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)


def delay(milliseconds: float) -> None:
    """Keep the current stream busy; nothing on the CPU."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(round(milliseconds * CYCLES_PER_MILLISECOND))
