from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.reduce.status import GroupStatus, RankStatus, read_status, status_length, write_status

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
RANKS = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2_000_000)), min_size=1, max_size=50)


def one_after_another(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def in_a_tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [torch.stack(parts[start : start + 2]).sum(0) for start in range(0, len(parts), 2)]
    return parts[0]


def sums(ranks: list[RankStatus], dtype: torch.dtype, add: Callable[[list[Tensor]], Tensor]) -> list[float]:
    size = len(ranks)
    numbers = add([torch.tensor(write_status(each, rank, size), dtype=dtype) for rank, each in enumerate(ranks)])
    return [float(number) for number in numbers]


@given(said=RANKS, dtype=DTYPES)
def test_what_ranks_say_comes_through_a_sum_in_any_dtype(
    said: list[tuple[bool, bool, int]], dtype: torch.dtype
) -> None:
    ranks = [RankStatus(has_failed=failed, has_changed=changed, batch_size=size) for failed, changed, size in said]
    numbers = sums(ranks, dtype, one_after_another)
    assert len(numbers) == status_length(len(said))
    assert read_status(numbers) == GroupStatus(
        failed=tuple(rank for rank, each in enumerate(ranks) if each.has_failed),
        changed=tuple(rank for rank, each in enumerate(ranks) if each.has_changed),
        batch_sizes=tuple(each.batch_size for each in ranks),
    )


@pytest.mark.parametrize("add", [one_after_another, in_a_tree])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [300, 2500])
def test_more_ranks_than_half_precision_can_count(
    size: int, dtype: torch.dtype, add: Callable[[list[Tensor]], Tensor]
) -> None:
    # bfloat16 counts to 256 and float16 to 2048: a change on all of 300 ranks looked like one on 256 of them, and was
    # refused.
    ranks = [RankStatus(has_changed=True, has_failed=rank % 7 == 0, batch_size=rank) for rank in range(size)]
    status = read_status(sums(ranks, dtype, add))
    assert status.changed == tuple(range(size))
    assert status.failed == tuple(range(0, size, 7))
    assert status.batch_sizes == tuple(range(size))
    counts = add([torch.ones(1, dtype=dtype) for _ in range(size)])  # of used parameters, which are compared with zero
    assert counts.item() > 0
    assert counts.isfinite().all()


def test_batches_are_uneven_where_two_ranks_that_know_theirs_differ() -> None:
    def uneven(*sizes: int) -> tuple[int, ...]:
        return GroupStatus(failed=(), changed=(), batch_sizes=sizes).uneven_batch_sizes

    assert uneven(4, 4, 4) == ()
    assert uneven(4, 0, 4) == ()
    assert uneven(4, 3, 0) == (4, 3, 0)
