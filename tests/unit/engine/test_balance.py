from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import Cursor, ShardedBatch, ShardedLoader
from lockstep.data.batch import ShardAssignment
from lockstep.engine.balance import ShardBalance, Stopwatch
from lockstep.recording import EventKind, WorkerRecorder


def loader(rank: int, num_workers: int = 0) -> ShardedLoader:
    data = TensorDataset(torch.arange(96))
    world = World(rank=rank, world_size=2, group=None)
    return ShardedLoader(data, batch_size=8, num_shards=8, num_workers=num_workers, world=world)


def sizes(batch: ShardedBatch) -> list[int]:
    return [len(shards) for shards in batch.ranges]


def run(rank: int, seconds: Any, num_workers: int = 0, num_epochs: int = 1) -> list[ShardedBatch]:
    balance, found = ShardBalance(None), []
    data = loader(rank, num_workers)
    for epoch in range(num_epochs):
        for batch in data.epoch(epoch):
            found.append(batch)
            balance.note(batch, seconds(len(found)), batch.assignment.last_requested)
    return found


def test_shards_move_to_the_faster_worker_and_no_sample_is_lost() -> None:
    first, second = (run(rank, lambda _: (0.1, 0.3)) for rank in range(2))
    assert sizes(first[0]) == [4, 4]
    assert sizes(first[-1]) == [6, 2]
    for one, other in zip(first, second, strict=True):
        assert one.ranges == other.ranges
        assert [part.shard for part in (*one.slices, *other.slices)] == list(range(8))
    seen = torch.cat([part.data[0] for batch in (*first, *second) for part in batch.slices])
    assert sorted(seen.tolist()) == list(range(96))


def test_one_slow_step_moves_nothing() -> None:
    assert {tuple(sizes(batch)) for batch in run(0, lambda step: (0.1, 5.0 if step == 4 else 0.1))} == {(4, 4)}


def test_without_a_measurement_nothing_moves() -> None:
    assert {tuple(sizes(batch)) for batch in run(0, lambda _: (0.1, 0.0))} == {(4, 4)}


def test_a_change_waits_for_what_is_being_loaded() -> None:
    # Loading processes have asked for the slices of some steps to come: those stay who they were for.
    first, second = (run(rank, lambda _: (0.1, 0.3), num_workers=1, num_epochs=2) for rank in range(2))
    assert sizes(first[5]) == [4, 4]
    assert sizes(first[-1]) == [6, 2]
    for one, other in zip(first, second, strict=True):
        assert [part.shard for part in (*one.slices, *other.slices)] == list(range(8))


def test_a_change_waits_for_batches_that_the_user_has_taken_ahead() -> None:
    # A prefetcher on rank 0 is further ahead than the one on rank 1: the change once came in the middle of the former.
    def taken(num_ahead: tuple[int, int]) -> list[list[ShardedBatch]]:
        loaders = [loader(rank).epoch(0) for rank in range(2)]
        balances = [ShardBalance(None), ShardBalance(None)]
        waiting: list[list[ShardedBatch]] = [[], []]
        found: list[list[ShardedBatch]] = [[], []]
        for _ in range(12):
            for rank, ahead in enumerate(num_ahead):
                waiting[rank] += islice(loaders[rank], ahead - len(waiting[rank]))
            batches = [waiting[rank].pop(0) for rank in range(2)]
            last_requested = max(batch.assignment.last_requested for batch in batches)
            for rank, batch in enumerate(batches):
                found[rank].append(batch)
                balances[rank].note(batch, (0.1, 0.3), last_requested)
        return found

    first, second = taken((4, 1))
    assert sizes(first[7]) == [4, 4]
    assert sizes(first[-1]) == [6, 2]
    assert [batch.ranges for batch in first] == [batch.ranges for batch in second]


def test_who_asks_in_another_thread_waits_for_the_decision() -> None:
    assignment = ShardAssignment(World(rank=0, world_size=2, group=None), 8)
    with ThreadPoolExecutor() as pool:
        with assignment.held():
            asking = pool.submit(assignment.ranges, Cursor(0, 1))
            assert not wait([asking], 0.05).done
            assignment.change([range(6), range(6, 8)], after=Cursor(), last_requested=Cursor())
        assert asking.result() == (range(6), range(6, 8))


def test_shards_come_back_when_a_worker_recovers() -> None:
    found = run(0, lambda step: (0.1, 0.3 if step < 12 else 0.1), num_epochs=3)
    assert sizes(found[11]) == [6, 2]
    assert sizes(found[-1]) == [4, 4]


# -- How long a shard takes, from recorded events: the wait for others, after the last shard, is no part of it ---------


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
