"""`ShardedBatch`: one worker's part of the global batch of one step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lockstep.comm import World
from lockstep.data.assignment import ShardAssignment
from lockstep.data.cursor import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one shard works on in one step."""

    shard: int
    """Number of the shard."""
    num_samples: int
    """How many samples it holds; at least 1."""
    data: Any
    """The collated samples, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBatch:
    """This worker's part of the global batch of one step."""

    cursor: Cursor
    """Which step of which epoch."""
    num_steps: int
    """Steps of the epoch."""
    num_samples: int
    """Samples of the global batch, over all workers."""
    num_shards: int
    """Number of shards of the loader that made it."""
    slices: tuple[Slice, ...]
    """Slices of this worker's shards, in shard order; those without a sample are left out."""
    ranges: tuple[range, ...]
    """The shards of every worker, in rank order."""
    source: str
    """The loader in words: equal for loaders that make the same batches of the same data."""
    content: int
    """A number for the data, which distinguishes it from other data of the same length."""
    assignment: ShardAssignment
    """Who runs which shards in the steps to come; may be changed."""
    world: World
    """The workers for which it was cut."""
    recut: "Callable[[ShardedBatch], ShardedBatch]" = field(repr=False)
    """Cuts it for the present workers; see `for_present_workers`."""

    def for_present_workers(self) -> "ShardedBatch":
        """Return this batch, cut for the workers that there are now (local).

        It holds the same samples with the same random states, whoever loads them: slices that this worker has already
        are kept, and others are loaded in this process. Each worker must call it, for the batch of the same step.

        Raises:
            ValueError: There are more workers than shards.
        """
        return self.recut(self)

    def __iter__(self) -> NoReturn:
        """Refuse to be taken apart as a DataLoader's batch is."""
        raise TypeError(
            "A ShardedBatch is given to Trainer.step as it is: trainer.step(batch). The loss function gets its slices, "
            "as the data set and collate_fn made them."
        )
