"""Switches of torch that tests of several rooms set."""

from collections.abc import Iterator

import pytest
import torch


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
