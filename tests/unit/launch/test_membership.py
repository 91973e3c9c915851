import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.membership import (
    Changes,
    Generation,
    RespawnLimit,
    Stop,
    Wishes,
    WorkerLimits,
    may_respawn,
    next_generation,
    planned_changes,
)

THREE = Generation(number=4, workers=(2, 5, 7))


def decide(changes: Changes, *, current: Generation = THREE, minimum: int = 1, maximum: int = 8) -> Generation | Stop:
    return next_generation(current, changes, WorkerLimits(min_workers=minimum, max_workers=maximum))


def test_nothing_happened() -> None:
    assert decide(Changes()) is THREE


def test_ranks_close_up_behind_a_lost_worker() -> None:
    found = decide(Changes(lost={2}))
    assert found == Generation(number=5, workers=(5, 7))
    assert [found.rank_of(worker) for worker in (2, 5, 7)] == [None, 0, 1]


def test_workers_that_stay_come_before_new_ones() -> None:
    assert decide(Changes(lost=[5], arrived=[9, 8])) == Generation(number=5, workers=(2, 7, 9, 8))


def test_a_worker_that_leaves_is_no_longer_there() -> None:
    assert decide(Changes(leaving=[7])) == Generation(number=5, workers=(2, 5))


def test_a_new_worker_that_is_lost_before_it_begins_changes_nothing() -> None:
    assert decide(Changes(lost=[9], arrived=[9])) is THREE


def test_new_workers_wait_where_there_is_no_shard_for_them() -> None:
    assert decide(Changes(arrived=[8, 9]), maximum=4) == Generation(number=5, workers=(2, 5, 7, 8))
    assert decide(Changes(arrived=[8]), maximum=3) is THREE


def test_new_workers_alone_have_no_state_to_continue_with() -> None:
    found = decide(Changes(lost=[2, 5, 7], arrived=[8]))
    assert isinstance(found, Stop)
    assert "All 3 workers ended" in found.reason
    assert "newest checkpoint" in found.reason


def test_too_few_workers_stop_the_run() -> None:
    found = decide(Changes(lost=[2, 5]), minimum=2)
    assert isinstance(found, Stop)
    assert "1 of 3 workers is left, and min_workers is 2" in found.reason
    assert decide(Changes(lost=[2, 5], arrived=[8]), minimum=2) == Generation(number=5, workers=(7, 8))


NUMBERS = st.lists(st.integers(0, 9), unique=True, max_size=6)


@given(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6), NUMBERS, NUMBERS, NUMBERS)
def test_each_generation_begins_with_a_worker_of_the_one_before(
    workers: list[int], lost: list[int], leaving: list[int], arrived: list[int]
) -> None:
    current = Generation(number=0, workers=tuple(workers))
    found = decide(Changes(lost=lost, leaving=leaving, arrived=arrived), current=current, maximum=6)
    if isinstance(found, Stop):
        assert set(workers) <= {*lost, *leaving}
        return
    assert found.workers[0] in workers
    assert len(set(found.workers)) == len(found.workers) <= 6
    assert not {*lost, *leaving} & set(found.workers)
    assert (found == current) == (found.workers == current.workers)


def test_respawns_are_counted_in_a_window() -> None:
    limit = RespawnLimit(count=2, seconds=60.0)
    assert may_respawn(limit, [], now=0.0)
    assert may_respawn(limit, [0.0], now=10.0)
    assert not may_respawn(limit, [0.0, 5.0], now=59.0)
    assert may_respawn(limit, [0.0, 5.0], now=61.0)
    assert not may_respawn(RespawnLimit(count=0, seconds=60.0), [], now=0.0)


@pytest.mark.parametrize(
    ("wishes", "leaving", "arrived"),
    [
        pytest.param(Wishes(num_workers=3), (), (), id="nothing"),
        pytest.param(Wishes(num_workers=3, arrived=[8]), (), (), id="a spare waits"),
        pytest.param(Wishes(num_workers=4, arrived=[8, 9]), (), (8,), id="one more"),
        pytest.param(Wishes(num_workers=9, arrived=[8, 9]), (), (8,), id="not more than shards"),
        pytest.param(Wishes(num_workers=1), (5, 7), (), id="the last ones leave"),
        pytest.param(Wishes(num_workers=2, leaving=[5]), (5,), (), id="one has asked to leave"),
        pytest.param(Wishes(num_workers=3, leaving=[5], arrived=[8]), (5,), (8,), id="one in its place"),
        pytest.param(Wishes(num_workers=0, leaving=[2, 5, 7]), (5, 7), (), id="one keeps the state"),
    ],
)
def test_what_changes_at_a_step_boundary(wishes: Wishes, leaving: tuple[int, ...], arrived: tuple[int, ...]) -> None:
    found = planned_changes(THREE, wishes, WorkerLimits(max_workers=4))
    assert (found.leaving, found.arrived) == (leaving, arrived)


def test_nobody_leaves_where_too_few_would_be_left() -> None:
    limits = WorkerLimits(min_workers=3, max_workers=6)
    assert not planned_changes(THREE, Wishes(num_workers=2, leaving=[5]), limits).leaving
    assert not planned_changes(THREE, Wishes(num_workers=2), limits).leaving
