import math

import pytest
import torch
from torch import Tensor

from lockstep.reduce.tensor_bits import sum_for_finite_check

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Small and large ones, of 100 everywhere: 65,504 is the largest number of half precision."""
    return [torch.full((size,), 100.0, dtype=dtype) for size in (3, 1 << 15, 0, 1000)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_finite_numbers_have_a_finite_sum(dtype: torch.dtype) -> None:
    total = sum_for_finite_check(tensors(dtype), CPU)
    assert total == 100.0 * (3 + (1 << 15) + 1000)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_one_bad_number_makes_the_sum_not_finite(bad: float, dtype: torch.dtype, number: int) -> None:
    found = tensors(dtype)
    found[number][-1] = torch.tensor(complex(0.0, bad) if dtype.is_complex else bad)
    assert not math.isfinite(sum_for_finite_check(found, CPU))


def test_infinities_of_both_signs_are_seen() -> None:
    assert not math.isfinite(sum_for_finite_check([torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf])], CPU))
    assert sum_for_finite_check([], CPU) == 0
