"""Is a batch one for this worker, and for this step of the run?"""

from typing import Any

from torch import nn

from lockstep.comm import World
from lockstep.data import Cursor, ShardedBatch


def check_cut(batch: Any, num_shards: int, world: World) -> None:
    """Check that a batch was cut for this number of shards and these workers.

    Raises:
        TypeError: It is not a batch of a ShardedLoader.
        ValueError: It was cut otherwise.
    """
    if not isinstance(batch, ShardedBatch):
        raise TypeError(
            f"The batch is a {type(batch).__name__}, expected what a ShardedLoader yields: "
            "for batch in loader.epoch(epoch): trainer.step(batch)."
        )
    if batch.num_shards != num_shards:
        raise ValueError(
            f"The batch is cut into {batch.num_shards} shards and the trainer has {num_shards}: give the loader and "
            "the trainer the same num_shards."
        )
    check_world(batch, world)


def check_world(batch: ShardedBatch, world: World) -> None:
    """Check that a batch was cut for these workers.

    Raises:
        ValueError: It was not.
    """
    mine = batch.ranges[world.rank] if world.rank < len(batch.ranges) else range(0)
    if len(batch.ranges) != world.world_size or any(part.shard not in mine for part in batch.slices):
        raise ValueError(
            f"The batch is rank {world.rank}'s of {len(batch.ranges)} workers, and the trainer has "
            f"{world.world_size}: make the loader in the worker that uses it, after the process group."
        )


def check_sync_batchnorm(batch: ShardedBatch, model: nn.Module) -> None:
    """Refuse a batch in which a shard has no samples, and so no part in a SyncBatchNorm.

    Raises:
        ValueError: The model has one, and the batch is smaller than the number of shards.
    """
    if batch.num_samples >= batch.num_shards:
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if name is not None:
        raise ValueError(
            f"The batch of {place_of(batch.cursor)} has {batch.num_samples} samples for {batch.num_shards} shards, and "
            f"{name or 'the model'} is SyncBatchNorm, in whose statistics every worker takes part: some have nothing "
            "to give. Use BatchNorm, or a batch size that leaves a larger last batch."
        )


def place_of(cursor: Cursor) -> str:
    """Return in words where a step is."""
    return f"epoch {cursor.epoch}, step {cursor.step} (counted from 0)"
