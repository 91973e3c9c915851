import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lockstep.processes.reproducibility import seed_generators, set_deterministic, warn_of_late_workspace


@pytest.fixture(autouse=True)
def _switches_restored() -> Iterator[None]:
    yield
    set_deterministic(True)


def test_every_generator_is_seeded() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    seed_generators(2**62 + 5)
    first = draw()
    seed_generators(2**62 + 5)
    assert draw() == first
    seed_generators(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("deterministic", [True, False])
def test_switches_follow(deterministic: bool) -> None:
    set_deterministic(deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic


def test_a_workspace_that_is_set_too_late_for_cublas_is_warned_of() -> None:
    def multiply() -> None:  # in torch's words
        raise RuntimeError("... you must set an environment variable ...: CUBLAS_WORKSPACE_CONFIG=:4096:8 or ...")

    with pytest.warns(UserWarning, match=r"before CUBLAS_WORKSPACE_CONFIG was set.*CONFIG=:4096:8"):
        warn_of_late_workspace(multiply)


def test_a_workspace_that_is_set_in_time_is_not_warned_of() -> None:
    warn_of_late_workspace(lambda: None)


def test_another_error_of_the_first_product_is_raised() -> None:
    def multiply() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        warn_of_late_workspace(multiply)
