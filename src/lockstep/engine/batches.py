"""Check that a batch is for this worker and for this step of the run; `gather_results` lets an error raise on all."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, final

from torch import nn

from lockstep.comm import World, calls_for
from lockstep.data import Cursor, ShardedBatch
from lockstep.errors import PeerFailedError, counted
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.modules import TorchsSyncBatchNorm

Result = TypeVar("Result")


def check_cut(batch: Any, num_shards: int, world: World) -> None:
    if not isinstance(batch, ShardedBatch):
        raise TypeError(
            f"The batch is a {type(batch).__name__}, expected what a ShardedLoader yields: "
            "for batch in loader.epoch(epoch): trainer.step(batch). (LS511)"
        )
    if batch.num_shards != num_shards:
        raise ValueError(
            f"The batch is cut into {batch.num_shards} shards and the trainer has {num_shards}: make the loader by "
            "trainer.loader(dataset, batch_size=...), or with the same num_shards. (LS511)"
        )
    check_world(batch, world)


def check_world(batch: ShardedBatch, world: World) -> None:
    mine = batch.ranges[world.rank] if world.rank < len(batch.ranges) else range(0)
    if len(batch.ranges) != world.world_size or any(part.shard not in mine for part in batch.slices):
        raise ValueError(
            f"The batch is rank {world.rank}'s of {counted(len(batch.ranges), 'worker')}, and the trainer has "
            f"{world.world_size}: make the loader in the worker that uses it, after the process group. (LS511)"
        )


def check_sync_batchnorm(batch: ShardedBatch, model: nn.Module) -> None:
    if batch.num_samples >= batch.num_shards:
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, TorchsSyncBatchNorm)), None)
    if name is not None:
        raise ValueError(
            f"The batch of {name_step(batch.cursor)} has {batch.num_samples} samples for {batch.num_shards} shards, "
            f"and {name or 'the model'} is SyncBatchNorm, in whose statistics every worker takes part: some have "
            "nothing to give. Use BatchNorm, or a batch size that leaves a larger last batch. (LS510)"
        )


@final
class BatchSequenceCheck:
    def __init__(self) -> None:
        self.source: str | None = None
        """The loader of the run in words; None before the first step."""
        self._last: tuple[int, World, int] | None = None
        """Of the batch before: its epoch, its workers, and the number of its data."""
        self._is_restored = False
        self._has_warned_of_repeating = False

    def note(self, batch: ShardedBatch) -> None:
        self.source, self._is_restored = batch.source, False
        self._last = batch.cursor.epoch, batch.world, batch.content

    def restore(self, source: str | None) -> None:
        """Take over the loader, in words, of a run that is resumed; None if it may be any."""
        self.source, self._is_restored = source, True

    def check(self, batch: ShardedBatch, cursor: Cursor) -> None:
        if self.source is not None and batch.source != self.source and self._is_restored:
            raise ValueError(
                f"The restored run was trained on a loader of {self.source}, and the batch is of one of "
                f"{batch.source}: samples would be seen twice, or never. Make the loader as it was; for other data, or "
                "another batch size, begin a new run with the weights of this one. (LS512)"
            )
        if self.source is not None and batch.source != self.source:
            raise ValueError(
                f"The batch is of a loader of {batch.source}, and this run trains on one of {self.source}. A run has "
                "one loader: put several data sets into one with torch.utils.data.ConcatDataset, or give each a "
                "trainer of its own. (LS512)"
            )
        # Other workers number the data anew, by what they load now: the loop may have changed it since the first step.
        *of_batch, content = self._last or (None, None, 0)
        if of_batch == [batch.cursor.epoch, batch.world] and content and batch.content not in {0, content}:
            raise ValueError(
                f"The batch of {name_step(batch.cursor)} is of other data than the one before it, of the same "
                "length: an epoch is of one loader. Put several data sets into one with "
                "torch.utils.data.ConcatDataset, or give each a trainer of its own. (LS512)"
            )
        if self._is_restored and batch.cursor != cursor:
            raise ValueError(
                f"The restored run continues at epoch {cursor.epoch}, step {cursor.step}, and the batch is "
                f"that of {name_step(batch.cursor)}: samples would be seen twice, or never. Begin with "
                "loader.epoch(trainer.cursor.epoch, trainer.cursor.step). (LS512)"
            )
        if batch.cursor < cursor and not self._has_warned_of_repeating:
            self._has_warned_of_repeating = True
            warnings.warn(
                f"The batch is that of {name_step(batch.cursor)}, which this trainer has taken already: the same "
                "samples come in the same order, with the same random numbers. Give loader.epoch the number of the "
                "epoch: for epoch in range(num_epochs): for batch in loader.epoch(epoch). (LS512)",
                stacklevel=stacklevel_of_user(),
            )


def name_step(cursor: Cursor) -> str:
    return f"epoch {cursor.epoch}, step {cursor.step} (counted from 0)"


def gather_results(world: World, compute: Callable[[], Result], purpose: str) -> list[Result]:
    """Return what `compute` returns on every worker, in rank order: small, picklable values (collective).

    If it raises on one worker, all others raise `PeerFailedError`, so no worker waits for one that has failed.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = compute()
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know of it
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        with calls_for(purpose):
            found: list[tuple[Result, str | None]] = world.gather_objects((result, said))
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback refers to this frame: a cycle that would keep all that the callers hold
    for rank, (_, other) in enumerate(found):
        if other is not None:
            raise PeerFailedError(f"Rank {rank} has failed in {purpose}: {other} (LS213)")
    return [value for value, _ in found]
