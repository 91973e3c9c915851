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
    next_generation,
    planned_changes,
)

THREE = Generation(number=4, workers=(2, 5, 7))


def decide(changes: Changes, *, current: Generation = THREE, minimum: int = 1, maximum: int = 8) -> Generation | Stop:
    return next_generation(current, changes, WorkerLimits(min_workers=minimum, max_workers=maximum))


@pytest.mark.parametrize(
    ("changes", "maximum", "workers"),
    [
        pytest.param(Changes(), 8, None, id="nothing"),
        pytest.param(Changes(lost={2}), 8, (5, 7), id="ranks close up behind a lost worker"),
        pytest.param(Changes(lost=[5], arrived=[9, 8]), 8, (2, 7, 9, 8), id="who stays comes before who is new"),
        pytest.param(Changes(leaving=[7]), 8, (2, 5), id="one leaves"),
        pytest.param(Changes(lost=[9], arrived=[9]), 8, None, id="a new one is lost before it begins"),
        pytest.param(Changes(arrived=[8, 9]), 4, (2, 5, 7, 8), id="there is one shard more"),
        pytest.param(Changes(arrived=[8]), 3, None, id="there is no shard for it"),
    ],
)
def test_the_next_generation(changes: Changes, maximum: int, workers: tuple[int, ...] | None) -> None:
    found = decide(changes, maximum=maximum)
    if workers is None:
        assert found is THREE
    else:
        assert found == Generation(number=5, workers=workers)
        assert [found.rank_of(worker) for worker in (0, *workers)] == [None, *range(len(workers))]


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
    times: list[float] = []
    assert [limit.take(times, now) for now in (0.0, 5.0, 59.0, 61.0)] == [True, True, False, True]
    assert not RespawnLimit(count=0, seconds=60.0).take([], now=0.0)


@pytest.mark.parametrize(
    ("wishes", "leaving", "arrived", "minimum"),
    [
        pytest.param(Wishes(num_workers=3), (), (), 1, id="nothing"),
        pytest.param(Wishes(num_workers=3, arrived=[8]), (), (), 1, id="a spare waits"),
        pytest.param(Wishes(num_workers=4, arrived=[8, 9]), (), (8,), 1, id="one more"),
        pytest.param(Wishes(num_workers=9, arrived=[8, 9]), (), (8,), 1, id="not more than shards"),
        pytest.param(Wishes(num_workers=1), (5, 7), (), 1, id="the last ones leave"),
        pytest.param(Wishes(num_workers=2, leaving=[5]), (5,), (), 1, id="one has asked to leave"),
        pytest.param(Wishes(num_workers=3, leaving=[5], arrived=[8]), (5,), (8,), 1, id="one in its place"),
        pytest.param(Wishes(num_workers=0, leaving=[2, 5, 7]), (5, 7), (), 1, id="one keeps the state"),
        pytest.param(Wishes(num_workers=2, leaving=[5]), (), (), 3, id="too few would be left"),
        pytest.param(Wishes(num_workers=2), (), (), 3, id="too few are wished for"),
    ],
)
def test_what_changes_at_a_step_boundary(
    wishes: Wishes, leaving: tuple[int, ...], arrived: tuple[int, ...], minimum: int
) -> None:
    found = planned_changes(THREE, wishes, WorkerLimits(min_workers=minimum, max_workers=4))
    assert (found.leaving, found.arrived) == (leaving, arrived)
