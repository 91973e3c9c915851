import pytest
import torch
from torch import nn

from lockstep.reduce.shard_reducer import may_accumulate_in_place

FIRST, SECOND, THIRD = (nn.Parameter(torch.zeros(1)) for _ in range(3))


@pytest.mark.parametrize(
    ("adds_once", "is_waiting", "expected"),
    [(True, False, {FIRST}), (False, False, set()), (True, True, set())],
)
def test_what_may_be_added_to_in_place(adds_once: bool, is_waiting: bool, expected: set[nn.Parameter]) -> None:
    partial = {FIRST, SECOND, THIRD}
    chosen = may_accumulate_in_place(
        partial, adds_once=adds_once, is_waiting=is_waiting, sparse={SECOND}, hooked={THIRD}
    )
    assert chosen == expected
