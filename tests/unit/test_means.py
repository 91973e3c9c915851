"""Means in parts, without ranks."""

import math

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


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2\], expected one number"):
        ls.mean_over_ranks(torch.ones(2), 4)
    with pytest.raises(ValueError, match="below zero or not finite"):
        ls.mean_over_ranks(torch.ones(()), -1)
    with pytest.raises(ls.LossError, match="is 0, expected more than zero"):
        ls.mean_over_ranks(torch.ones(()), 0)
