"""An epoch that continues with other workers."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.data.test_loader import Noisy, contents

from lockstep.comm import World
from lockstep.data import ShardedBatch, ShardedLoader

Contents = dict[tuple[int, int], list[list[float]]]


class Workers:
    """Loaders of several workers in one process; rank and number of each may change."""

    def __init__(self, worlds: list[World], **options: Any) -> None:
        self.worlds = worlds
        settings = {"batch_size": 8, "num_shards": 4, "seed": 5} | options
        self.loaders = [ShardedLoader(Noisy(30), world=self.ask(place), **settings) for place in range(len(worlds))]

    def ask(self, place: int) -> Callable[[], World]:
        return lambda: self.worlds[place]


def world(rank: int, world_size: int) -> World:
    return World(rank=rank, world_size=world_size, group=None)


def undisturbed(epoch: int = 1) -> Contents:
    return contents(list(ShardedLoader(Noisy(30), world=world(0, 1), batch_size=8, num_shards=4, seed=5).epoch(epoch)))


def steps_of(found: Contents, steps: set[int]) -> Contents:
    return {key: value for key, value in found.items() if key[0] in steps}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("lost", "left"), [(0, [1, 2]), (1, [0, 2]), (2, [0]), (0, [2])])
def test_remaining_workers_load_what_a_lost_one_had(lost: int, left: list[int], num_workers: int) -> None:
    workers = Workers([world(rank, 3) for rank in range(3)], num_workers=num_workers)
    epochs = [loader.epoch(1) for loader in workers.loaders]
    before = contents([next(epoch) for epoch in epochs])
    batches = [next(epoch) for epoch in epochs]
    for rank, place in enumerate(left):
        workers.worlds[place] = world(rank, len(left))
    repeated = contents([batches[place].for_present_workers() for place in left])
    after: Contents = {}
    for place in left:
        after |= contents(list(epochs[place]))
    assert before | repeated | after == undisturbed()
    assert lost not in left


def test_a_worker_keeps_the_slices_that_it_has() -> None:
    workers = Workers([world(rank, 2) for rank in range(2)])
    batch = next(workers.loaders[1].epoch(0))
    workers.worlds[1] = world(0, 1)
    again = batch.for_present_workers()
    assert {part.shard for part in again.slices} == {0, 1, 2, 3}
    assert all(any(part is each for each in again.slices) for part in batch.slices)


def test_a_batch_of_earlier_workers_can_be_cut_for_later_ones_more_than_once() -> None:
    workers = Workers([world(0, 1)])
    batches: list[ShardedBatch] = list(workers.loaders[0].epoch(1))  # all were loaded before the workers changed
    workers.worlds[0] = world(1, 2)
    mine = contents([batch.for_present_workers() for batch in batches])
    workers.worlds[0] = world(0, 2)
    others = contents([batch.for_present_workers() for batch in batches])
    assert mine.keys().isdisjoint(others)
    assert mine | others == undisturbed()


def test_an_epoch_continues_with_more_workers() -> None:
    workers = Workers([world(0, 1), world(1, 2)])
    first = workers.loaders[0].epoch(1)
    before = contents([next(first)])
    workers.worlds[0] = world(0, 2)
    batch = next(first)  # loaded for the workers of before: the loader does not ask in mid-epoch
    assert len(batch.ranges) == 1
    batches = [batch.for_present_workers(), *first, *workers.loaders[1].epoch(1, start_step=1)]
    assert before | contents(batches) == undisturbed()
    assert len(batches) == 2 * 3


def test_more_workers_than_shards_are_refused() -> None:
    workers = Workers([world(0, 1)])
    batch = next(workers.loaders[0].epoch(0))
    workers.worlds[0] = world(0, 5)
    with pytest.raises(ValueError, match="5 workers"):
        batch.for_present_workers()
