import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.shards import even_ranges
from lockstep.shards.assignment import balance_ranges


def counts(seconds: list[float], num_shards: int, min_gain: float = 0.0) -> list[int]:
    return [len(shards) for shards in balance_ranges(seconds, even_ranges(len(seconds), num_shards), min_gain=min_gain)]


@pytest.mark.parametrize(
    ("seconds", "num_shards", "expected"),
    [
        ([1.0, 1.0], 8, [4, 4]),
        ([1.0, 3.0], 8, [6, 2]),
        ([3.0, 1.0], 8, [2, 6]),
        ([1.0, 100.0], 8, [7, 1]),  # every worker runs at least one shard
        ([1.0, 2.0, 2.0], 8, [4, 2, 2]),
        ([1.0, 3.0], 2, [1, 1]),
    ],
)
def test_the_slowest_worker_finishes_as_early_as_possible(
    seconds: list[float], num_shards: int, expected: list[int]
) -> None:
    assert counts(seconds, num_shards) == expected


@given(seconds=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), more=st.integers(0, 20))
def test_ranges_cover_every_shard_once_and_are_never_slower(seconds: list[float], more: int) -> None:
    before = even_ranges(len(seconds), len(seconds) + more)
    after = balance_ranges(seconds, before, min_gain=0.0)
    assert [shard for shards in after for shard in shards] == list(range(len(seconds) + more))
    assert all(after)

    def slowest(ranges: tuple[range, ...]) -> float:
        return max(len(shards) * time for shards, time in zip(ranges, seconds, strict=True))

    assert slowest(after) <= slowest(before)


def test_a_small_gain_moves_nothing() -> None:
    # 4 shards of 1.0 against 4 of 1.3: moving one shard shortens the step from 5.2 to 5.0.
    assert counts([1.0, 1.3], 8) == [5, 3]
    assert counts([1.0, 1.3], 8, min_gain=0.08) == [4, 4]
