"""`ShardedBatch`: one worker's part of the global batch of one step."""

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from lockstep.comm import World
from lockstep.data.keyed import list_samples
from lockstep.errors import LockstepError
from lockstep.shards import even_ranges


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """The position of a run in its data: the next step to be taken. Epochs and steps are counted from 0."""

    epoch: int = 0
    step: int = 0

    def advance(self, num_steps: int | None) -> "Cursor":
        """Return the cursor one step on, in an epoch of `num_steps` steps; None if it has more, but not how many."""
        if num_steps is None or self.step + 1 < num_steps:
            return Cursor(self.epoch, self.step + 1)
        return Cursor(self.epoch + 1, 0)


@final
class ShardAssignment:
    """The shards of every worker, step by step; the same on every worker.

    A loader requests the shards of later steps because it prefetches. So a change takes effect at a step that no worker
    has requested yet.
    """

    def __init__(self, world: World, num_shards: int) -> None:
        self.world = world
        self.last_requested = Cursor()
        self._asking = threading.RLock()
        self._before = self._now = even_ranges(world.world_size, num_shards)
        self._since = Cursor()

    def ranges(self, cursor: Cursor) -> tuple[range, ...]:
        with self._asking:
            self.last_requested = max(self.last_requested, cursor)
            return self._now if cursor >= self._since else self._before

    def held(self) -> AbstractContextManager[object]:
        """Return a context that blocks requests of other threads, so that `last_requested` does not change in it."""
        return self._asking

    def is_changing(self, cursor: Cursor) -> bool:
        """Whether a change is decided that does not hold yet in the step at `cursor`."""
        return cursor < self._since

    def change(self, ranges: Sequence[range], *, after: Cursor, last_requested: Cursor) -> None:
        """Let workers run other shards when `after` is over, from the first beyond every worker's `last_requested`."""
        self._before = self.ranges(after)
        self._now = tuple(ranges)
        self._since = Cursor(last_requested.epoch, last_requested.step + 1)


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
    lengths: tuple[int, ...]
    """Samples of each shard, as far as there are samples."""
    ranges: tuple[range, ...]
    """The shards of every worker, in rank order."""
    source: str
    """The loader in words: equal for loaders that make the same batches of the same data."""
    content: int
    """A number for the data, which distinguishes it from other data of the same length."""
    number: int = 0
    """A number for what was read of a stream, as far as this batch; 0 for other data, and for a worker alone."""
    assignment: ShardAssignment
    """Who runs which shards in the steps to come; may be changed."""
    world: World
    """The workers for which it was cut."""
    recut: "Callable[[ShardedBatch], ShardedBatch]" = field(repr=False)
    """Cuts it for the present workers; see `for_present_workers`."""
    load_again: "Callable[[Sequence[int], int], Any] | None" = field(repr=False, default=None)
    """Loads and collates samples of the global batch by their places in it, with the random states that they have so
    many epochs later (local); None of a stream: it is read."""
    load_shard: "Callable[[int, int], Any] | None" = field(repr=False, default=None)
    """Loads a shard's slice, whoever's it is, in the same way; None where what collates records may write to them."""

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
        if isinstance(error, Exception):
            self.note(error)

    def note(self, error: Exception) -> None:
        if isinstance(error, LockstepError):
            return
        cursor, indices = self._cursor, self._indices
        samples = f", samples {list_samples(indices)} of the data set" if indices else ""
        error.add_note(f"At epoch {cursor.epoch}, step {cursor.step} (counted from 0), shard {self._shard}{samples}.")
