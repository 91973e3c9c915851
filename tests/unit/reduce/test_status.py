from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.reduce.status import (
    COMPARISON_LIMIT,
    FINGERPRINT_LIMIT,
    GroupStatus,
    RankStatus,
    read_status,
    status_length,
    write_status,
)

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
STATUSES = st.builds(
    RankStatus,
    has_failed=st.booleans(),
    has_changed=st.booleans(),
    is_empty=st.booleans(),
    batch_size=st.integers(0, 2_000_000),
    num_backwards=st.integers(1, 127),
    comparison=st.integers(0, COMPARISON_LIMIT - 1),
    inputs=st.integers(0, FINGERPRINT_LIMIT - 1),
    gradients=st.integers(0, FINGERPRINT_LIMIT - 1),
    nonfinite=st.integers(0, 2_000_000),
)
RANKS = st.lists(STATUSES, min_size=1, max_size=10)


def one_after_another(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def in_a_tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [torch.stack(parts[start : start + 2]).sum(0) for start in range(0, len(parts), 2)]
    return parts[0]


def write_all(ranks: list[RankStatus], dtype: torch.dtype) -> list[Tensor]:
    numbers = (array("d", write_status(each, rank, len(ranks))) for rank, each in enumerate(ranks))
    return [torch.frombuffer(each, dtype=torch.float64).to(dtype) for each in numbers]


@given(ranks=RANKS, dtype=DTYPES)
def test_what_ranks_say_comes_through_a_sum_in_any_dtype(ranks: list[RankStatus], dtype: torch.dtype) -> None:
    numbers = one_after_another(write_all(ranks, dtype)).tolist()
    assert len(numbers) == status_length(len(ranks))
    assert read_status(tuple(numbers)) == GroupStatus(
        failed=tuple(rank for rank, each in enumerate(ranks) if each.has_failed),
        changed=tuple(rank for rank, each in enumerate(ranks) if each.has_changed),
        empty=tuple(rank for rank, each in enumerate(ranks) if each.is_empty),
        batch_sizes=tuple(each.batch_size for each in ranks),
        nums_backwards=tuple(each.num_backwards for each in ranks),
        comparisons=tuple(each.comparison for each in ranks),
        inputs=tuple(each.inputs for each in ranks),
        gradients=tuple(each.gradients for each in ranks),
        nonfinite=tuple(each.nonfinite for each in ranks),
    )


def test_ranks_agree_where_their_numbers_are_the_same() -> None:
    assert GroupStatus(failed=(), changed=(), comparisons=(7, 7, 7)).agrees
    assert not GroupStatus(failed=(), changed=(), comparisons=(7, 7, 8)).agrees


@pytest.mark.parametrize(("size", "dtype"), [(300, torch.bfloat16), (300, torch.float16), (2100, torch.float16)])
def test_more_ranks_than_half_precision_can_count(size: int, dtype: torch.dtype) -> None:
    # bfloat16 counts to 256 and float16 to 2048: a change on all of 300 ranks looked like one on 256 of them, and was
    # refused.
    ranks = [RankStatus(has_changed=True, has_failed=rank % 7 == 0, batch_size=rank) for rank in range(size)]
    parts = write_all(ranks, dtype)
    for add in (one_after_another, in_a_tree):
        status = read_status(tuple(add(parts).tolist()))
        assert status.changed == tuple(range(size))
        assert status.failed == tuple(range(0, size, 7))
        assert status.batch_sizes == tuple(range(size))
        counts = add([torch.ones(1, dtype=dtype) for _ in range(size)])  # of used parameters, compared with zero
        assert counts.item() > 0
        assert counts.isfinite().all()


def test_batches_are_uneven_where_two_ranks_that_know_theirs_differ() -> None:
    def uneven(*sizes: int) -> tuple[int, ...]:
        return GroupStatus(failed=(), changed=(), batch_sizes=sizes).uneven_batch_sizes

    assert uneven(4, 4, 4) == ()
    assert uneven(4, 0, 4) == ()
    assert uneven(4, 3, 0) == (4, 3, 0)
