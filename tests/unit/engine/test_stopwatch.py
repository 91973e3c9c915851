"""How long a shard takes, from recorded events: the wait for others, after the last shard, is no part of it."""

import pytest

from lockstep.engine.balance import Stopwatch
from lockstep.recording import EventKind, WorkerRecorder


def measured(moments: dict[int, tuple[int, int]], last_gradient_ns: int = 0) -> float:
    recorder = WorkerRecorder()
    recorder.moments = lambda number: moments.get(number, (0, 0))
    stopwatch = Stopwatch(recorder, lambda: last_gradient_ns)
    stopwatch.start()
    for number in moments:
        stopwatch.begin_shard(number)
    return stopwatch.seconds_per_shard()


def test_the_last_shard_is_left_out_for_it_waits_for_others() -> None:
    second = 1_000_000_000
    assert measured({1: (second, 2 * second), 2: (2 * second, 4 * second), 3: (4 * second, 90 * second)}) == 1.5


def test_an_only_shard_ends_with_its_last_gradient() -> None:
    assert measured({1: (1_000_000_000, 9_000_000_000)}, last_gradient_ns=3_000_000_000) == 2.0


@pytest.mark.parametrize("moments", [{}, {1: (0, 0)}, {1: (0, 0), 2: (5, 6)}])
def test_what_is_not_known_is_0(moments: dict[int, tuple[int, int]]) -> None:
    assert measured(moments, last_gradient_ns=7) == 0.0


def test_a_step_does_not_count_the_shards_of_the_one_before() -> None:
    recorder = WorkerRecorder()
    stopwatch = Stopwatch(recorder, lambda: 0)
    for _ in range(2):
        stopwatch.start()
        for shard in range(3):
            event = recorder.begin(EventKind.SHARD, shard, 0, 0)
            stopwatch.begin_shard(event)
            recorder.end(event)
    begin, end = recorder.moments(4)[0], recorder.moments(5)[1]
    assert stopwatch.seconds_per_shard() == pytest.approx((end - begin) / 1e9 / 2)
