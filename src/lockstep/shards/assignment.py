"""Which worker runs which shard, and how a range of indices is split into equal parts."""

from itertools import pairwise

from lockstep.errors import counted


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
    """Return the shards that worker `rank` of `world_size` runs.

    If `num_shards` is not a multiple of `world_size`, ranges differ in length by one. Bounds are rounded down, as the
    tree does when it halves a range, so that each range consists of few subtrees.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} is outside a world of {counted(world_size, 'worker')}. "
            f"Expected 0 to {world_size - 1}. (LS102)"
        )
    if world_size > num_shards:
        raise ValueError(
            f"{world_size} workers cannot share {num_shards} shards: some would have nothing to do. "
            f"Use at most {num_shards} workers, or set num_shards to {world_size} or more. (LS809)"
        )
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def even_ranges(world_size: int, num_shards: int) -> tuple[range, ...]:
    """Return the shards of every worker, in rank order."""
    return tuple(shard_range(rank, world_size, num_shards) for rank in range(world_size))
