"""Which worker runs which shard, how a range of indices is split into equal parts, and the seeds of what is run."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lockstep.errors import counted

_SEED_BITS = 63


def split_evenly(total: int, num_parts: int) -> list[tuple[int, int]]:
    """Split `range(total)` into contiguous (start, stop), of lengths that differ by at most one, the longer first."""
    if num_parts < 1 or total < 0:
        raise ValueError(
            f"Cannot split {total} indices into {num_parts} parts. Expected 0 or more indices and 1 or more parts."
        )
    short, longer = divmod(total, num_parts)
    starts = [index * short + min(index, longer) for index in range(num_parts + 1)]
    return list(pairwise(starts))


def shard_range(rank: int, world_size: int, num_shards: int) -> range:
    """Return the shards of a worker; bounds are rounded down, like the tree's halves, so a range has few subtrees."""
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} is outside a world of {counted(world_size, 'worker')}. "
            f"Expected 0 to {world_size - 1}. (LS102)"
        )
    if world_size > num_shards:
        raise ValueError(
            f"{world_size} workers cannot share {num_shards} shards: some would have nothing to do. "
            f"Use at most {num_shards} workers, or in a new run set num_shards to {world_size} or more. (LS809)"
        )
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def even_ranges(world_size: int, num_shards: int) -> tuple[range, ...]:
    return tuple(shard_range(rank, world_size, num_shards) for rank in range(world_size))


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


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in [0, 2**63) that depends on every argument and on nothing else.

    Each use of random numbers gets a seed of its own, so that no generator state has to be stored. Different arguments
    give unrelated seeds. Digests depend on this function, so its results may never change. `numbers` are the run's
    seed, then the position: epoch, step, shard or sample.
    """
    text = ":".join([purpose, *map(str, numbers)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
