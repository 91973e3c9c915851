"""What tests of several rooms set up: switches of torch, a group, no garbage collection."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64, and the seed is 0."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A default group of torch's own kind, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Reference counts alone free what is gone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
