"""Numbers for the bits of tensors: what they must tell apart."""

import pytest
import torch

from lockstep.reduce.tensor_bits import sum_of_bits


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
