import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lockstep.processes.reproducibility import seed_generators, set_deterministic


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
