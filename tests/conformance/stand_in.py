"""Gloo under another name: what a backend that torch does not know by name can pass.

A test that fails on this backend and passes on "gloo" asks for the name, not for a behaviour: no third-party
backend can pass it, whatever it does.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

NAME = "standin"


def register() -> None:
    """Register the stand-in, so that `init_process_group("standin")` works (local)."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroupGloo:
    return ProcessGroupGloo(store, rank, world_size, timeout)
