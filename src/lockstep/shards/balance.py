"""How many shards each worker should run when workers are not equally fast."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def balance_ranges(
    seconds_per_shard: Sequence[float], current: Sequence[range], *, min_gain: float
) -> tuple[range, ...]:
    """Return the shards that every worker should run, so that the slowest worker finishes as early as possible.

    Where that saves less than the fraction `min_gain` of a step's time, it is `current`: noise is to move no shards.
    """
    num_shards = current[-1].stop
    counts = [1] * len(current)
    for _ in range(num_shards - len(current)):
        ends = [(count + 1) * seconds for count, seconds in zip(counts, seconds_per_shard, strict=True)]
        counts[ends.index(min(ends))] += 1
    if _slowest(counts, seconds_per_shard) > (1 - min_gain) * _slowest(list(map(len, current)), seconds_per_shard):
        return tuple(current)
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def _slowest(counts: Sequence[int], seconds_per_shard: Sequence[float]) -> float:
    return max(count * seconds for count, seconds in zip(counts, seconds_per_shard, strict=True))
