"""Several workers on one GPU, which NCCL and `launch` refuse: they are CPU workers that can see it."""

from lockstep.devices import Device, Placement


def on_one_gpu(num_workers: int) -> Placement:
    device = Device(name="cpu", visible="0", label="GPU 0, shared")
    return Placement(devices=(device,) * num_workers, reason="shared by all workers")
