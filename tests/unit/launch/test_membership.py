from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.membership import (
    Changes,
    Generation,
    RespawnLimit,
    Stop,
    WorkerLimits,
    may_respawn,
    next_generation,
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
