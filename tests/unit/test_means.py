"""Means in parts, without ranks."""

import math
from typing import Any

import pytest
import torch

import lockstep as ls


def test_a_mean_is_read_by_name_and_as_a_pair() -> None:
    right, num_samples = found = ls.Mean(3.0, 4)
    assert (right, num_samples, found.value) == (3.0, 4, 0.75)
    nothing = ls.Mean(0.0, 0).value
    assert math.isnan(nothing)


def test_alone_a_mean_over_ranks_is_the_mean() -> None:
    total = torch.tensor(6.0, requires_grad=True)
    loss = ls.mean_over_ranks(total, torch.tensor(4))
    loss.backward()
    assert (loss.item(), total.grad) == (1.5, torch.tensor(0.25))


@pytest.mark.parametrize(
    ("total", "count", "said"),
    [
        (torch.ones(2), 4, r"shape \[2\], expected one number"),
        (3.0, 4, "total is a float, expected a tensor"),
        (torch.tensor(3), 4, "total is of torch.int64, expected floating-point"),
        (torch.tensor(3j), 4, "total is of torch.complex64"),
        (torch.ones(()), -1, "count is -1, which is below zero or not finite"),
        (torch.ones(()), math.nan, "count is nan, which"),
        (torch.ones(()), torch.ones(2), "count is no number"),
        (torch.ones(()), [4], "count is no number"),
        (torch.ones(()), 10**400, "count is no number"),
    ],
)
def test_what_is_no_sum_or_no_count_is_refused(total: Any, count: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*LS507"):
        ls.mean_over_ranks(total, count)


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ls.LossError, match="is 0, expected more than zero"):
        ls.mean_over_ranks(torch.ones(()), 0)
