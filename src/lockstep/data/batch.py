"""`ShardedBatch`: one worker's part of the global batch of one step."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from lockstep.comm import World
from lockstep.data.assignment import ShardAssignment
from lockstep.data.cursor import Cursor
from lockstep.errors import LockstepError

_NUM_SHOWN = 16
"""How many samples a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one shard works on in one step."""

    shard: int
    num_samples: int
    """How many samples it holds; at least 1."""
    data: Any
    """The collated samples, on the CPU."""
    indices: Sequence[int] = field(default=(), repr=False, compare=False)
    """The samples' numbers in the data set, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBatch:
    """This worker's part of the global batch of one step."""

    cursor: Cursor
    """Which step of which epoch."""
    num_steps: int | None
    """Steps of the epoch; None for a stream whose end is not known yet: then this is not the last step."""
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
    number: int = 0
    """A number for what was read of a stream, as far as this batch; 0 for other data."""
    assignment: ShardAssignment
    """Who runs which shards in the steps to come; may be changed."""
    world: World
    """The workers for which it was cut."""
    recut: "Callable[[ShardedBatch], ShardedBatch]" = field(repr=False)
    """Cuts it for the present workers; see `for_present_workers`."""

    @property
    def identity(self) -> int:
        """A number that is the same on workers that have parts of the same batch of the same data."""
        return zlib.crc32(f"{self.content} {self.number} {self.num_steps}".encode())

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
            "as the data set and collate_fn made them. (LS403)"
        )


@final
class ErrorPlace:
    """Adds to an error of the user's code for which slice it was raised: epoch, step, shard and samples."""

    __slots__ = ("_cursor", "_indices", "_shard")

    def __init__(self, cursor: Cursor, shard: int, indices: Sequence[int]) -> None:
        self._cursor = cursor
        self._shard = shard
        self._indices = indices

    def __enter__(self) -> None:
        """Begin with the slice."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, LockstepError):
            return
        cursor, indices = self._cursor, self._indices
        shown = ", ".join(map(str, indices[:_NUM_SHOWN])) + (", ..." if len(indices) > _NUM_SHOWN else "")
        samples = f", samples {shown} of the data set" if indices else ""
        error.add_note(f"At epoch {cursor.epoch}, step {cursor.step} (counted from 0), shard {self._shard}{samples}.")
