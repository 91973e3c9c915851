"""Which worker runs which shard, and which samples a shard gets."""

from itertools import pairwise


def split_evenly(total: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut `range(total)` into contiguous slices, the first ones longer by one where it does not divide.

    Returns:
        `num_parts` pairs (start, stop); slices are empty where `total` is smaller than their number.

    Raises:
        ValueError: A negative total, or no slices.
    """
    if num_parts < 1 or total < 0:
        raise ValueError(f"Cannot cut {total} into {num_parts} slices; expected 0 or more into 1 or more.")
    short, longer = divmod(total, num_parts)
    starts = [index * short + min(index, longer) for index in range(num_parts + 1)]
    return list(pairwise(starts))


def shard_range(rank: int, world_size: int, num_shards: int) -> range:
    """Return the shards that worker `rank` of `world_size` runs.

    Where it does not divide, the later halves are the longer ones, as in the tree: so ranges are made of few subtrees.

    Raises:
        ValueError: A rank outside the world, or more workers than shards.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"Rank {rank} is outside a world of {world_size} workers.")
    if world_size > num_shards:
        raise ValueError(
            f"{world_size} workers cannot share {num_shards} shards: some would have nothing to do. "
            f"Use at most {num_shards} workers, or set num_shards to {world_size} or more."
        )
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def even_ranges(world_size: int, num_shards: int) -> tuple[range, ...]:
    """Return the shards of every worker, in rank order.

    Raises:
        ValueError: More workers than shards.
    """
    return tuple(shard_range(rank, world_size, num_shards) for rank in range(world_size))
