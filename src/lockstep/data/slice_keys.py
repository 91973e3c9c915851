"""Which samples a worker loads for its slices, in which order: the keys that a DataLoader is given."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import final

from lockstep.data.assignment import ShardAssignment
from lockstep.data.cursor import Cursor
from lockstep.data.keyed import SliceKeys
from lockstep.data.samples import Draws, EpochSamples

Keys = Callable[[], Iterator[SliceKeys]]
"""Makes the keys of each slice to load, in order."""


@final
class SlicePlan:
    """What a DataLoader is to load; generated lazily, because an epoch may have millions of samples."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[SliceKeys]:
        return self.keys()


@final
class EpochRanges:
    """The shards of every worker in the steps of an epoch; those of a step do not change after the first request."""

    def __init__(self, assignment: ShardAssignment, epoch: int) -> None:
        self._assignment = assignment
        self._epoch = epoch
        self._ranges: dict[int, tuple[range, ...]] = {}

    def ranges(self, step: int) -> tuple[range, ...]:
        if step not in self._ranges:
            self._ranges[step] = self._assignment.ranges(Cursor(self._epoch, step))
        return self._ranges[step]

    def forget(self, step: int) -> None:
        self._ranges.pop(step, None)


def keys_of_slices(first_step: int, samples: EpochSamples, epoch_ranges: EpochRanges, rank: int) -> Iterator[SliceKeys]:
    """Yield the keys of each slice of one worker, to the end of the epoch.

    Not a method of the loader: the DataLoader refers to this. In a reference cycle torch cannot signal the loading
    processes to exit, and waits 5 s for them.
    """
    for step in itertools.count(first_step):
        slices = samples.cut(step)
        if not any(slices):
            return
        for _, draws in own_slices(slices, epoch_ranges.ranges(step)[rank]):
            yield samples.keys(draws)


def keys_after(first: Sequence[SliceKeys], keys: Keys) -> Iterator[SliceKeys]:
    yield from first
    yield from keys()


def own_slices(slices: list[Draws], shards: range) -> list[tuple[int, Draws]]:
    """Return those of a worker's `shards` that have samples, with their draws."""
    return [(shard, slices[shard]) for shard in shards if len(slices[shard]) > 0]
