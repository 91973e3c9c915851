"""What the tests of this package share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_core_per_replica():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # else threads of replicas and threads within operations wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture
def double_precision():
    """New tensors are float64, and the seed is 0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
