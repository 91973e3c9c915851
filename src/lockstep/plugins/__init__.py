"""Lockstep in libraries that wrap models themselves, by what each library offers for that; nothing is patched.

    accelerate.py    Hugging Face Accelerate, and the Trainer of Transformers, which uses it
    lightning.py     Lightning's Trainer
    fabric.py        Lightning Fabric

Each module imports its library, which Lockstep does not depend on. `lockstep.drop_in` does the same for scripts that
are not changed at all.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm import init_process_group
from lockstep.settings import set_rendezvous


def make_group(strategy: Any, timeout: timedelta | None) -> None:
    """Make the default group as a strategy of Lightning or Fabric would, if there is none (collective)."""
    if dist.is_initialized():
        return
    environment = strategy.cluster_environment
    set_rendezvous(environment.main_address, environment.main_port)
    device = strategy.root_device
    init_process_group(
        strategy.process_group_backend,
        timeout=timeout,
        world_size=environment.world_size(),
        rank=environment.global_rank(),
        device_id=None if device.type == "cpu" else device,
    )
