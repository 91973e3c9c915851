import pytest
import torch
from torch import nn

from lockstep.reduce.in_place_accumulation import may_be_lent

FIRST, SECOND, THIRD = (nn.Parameter(torch.zeros(1)) for _ in range(3))


@pytest.mark.parametrize(
    ("adds_once", "is_waiting", "expected"),
    [(True, False, {FIRST}), (False, False, set()), (True, True, set())],
)
def test_what_may_be_lent(adds_once: bool, is_waiting: bool, expected: set[nn.Parameter]) -> None:
    partial = {FIRST, SECOND, THIRD}
    chosen = may_be_lent(partial, adds_once=adds_once, is_waiting=is_waiting, sparse={SECOND}, hooked={THIRD})
    assert chosen == expected
