"""Numbers for the bits of tensors: what they must tell apart."""

import math

import pytest
import torch

from lockstep.reduce.tensor_bits import glance_at_memory, glance_is_finite, sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.complex64])
def test_signs_and_powers_of_two_change_the_number(dtype: torch.dtype) -> None:
    values = torch.randn(6, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    numbers = [int(sum_of_bits([each])) for each in (values, -values, values * 2, values / 4, values + 1)]
    assert len(set(numbers)) == 5


def test_the_number_does_not_depend_on_how_a_tensor_is_laid_out() -> None:
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    laid_out = [values, values.to(memory_format=torch.channels_last), values[0, 0, 0, 0], values[0, 0, 0, 0].clone()]
    first, second, third, fourth = (int(sum_of_bits([each])) for each in laid_out)
    assert first == second
    assert third == fourth


@pytest.mark.parametrize("size", [1, 7, 5000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_glance_tells_tensors_apart_by_one_element(size: int, dtype: torch.dtype) -> None:
    values = torch.ones(size, dtype=dtype)
    other = values.clone()
    other[0] = -1
    assert glance_at_memory(values) == glance_at_memory(values.clone()) != glance_at_memory(other)


def test_a_glance_sees_what_lies_apart_or_nowhere() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    columns = wide[:, 1:3]
    before = glance_at_memory(columns)
    wide[2, 2] = 50
    assert glance_at_memory(columns) != before
    assert glance_at_memory(wide[:, :0]) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_glance_finds_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((1000,), 100.0, dtype=dtype)
    assert glance_is_finite(values)
    values[-1] = bad
    assert not glance_is_finite(values)
