"""What the workers tell each other once per step besides gradients: losses, and where each of them stands.

    row s < num_shards       loss * weight of shard s, its weight
    row num_shards + r       of worker r: epoch, step, a number for its loader, what its `Standing` holds, then its
                             `WorkerNumbers`

A row is written by one worker and zero on all others, so adding up in any order is exact, and everybody draws the same
conclusions from the same numbers.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World
from lockstep.data import Cursor, ShardedBatch
from lockstep.shards import add_in_tree_order

_NUM_COLUMNS = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one worker tells of a step besides losses."""

    seconds: float
    """How long a shard took; 0 where it was not measured."""
    asked: Cursor
    """The furthest step that its loader was asked for."""
    ran_inner: bool
    """Whether a backward has run another inside."""
    written: int
    """The number of the first parameter that was written before the update, counted from 1; 0 for none."""
    has_new_layout: bool
    """Whether the model has other buffers than when the step began."""
    wants_stop: bool
    """Whether it was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNumbers:
    """What a worker says of the state in which the step finds it; tensors are not read before all are exchanged."""

    options: int = 0
    """A number for the optimizer's options."""
    values: Tensor | int = 0
    """A number for the values of the parameters, where they were written since the last update."""
    gradients: Tensor | int = 0
    """A number that is not finite if a gradient is not, on this worker or, where it looks at a part, another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What all workers' shards came to."""

    losses: tuple[float, ...]
    """Of every shard, loss times weight; 0 for one without samples."""
    weights: tuple[float, ...]
    """Of every shard."""
    places: tuple[tuple[float, ...], ...]
    """Of every worker: what tells its batch from another."""
    standings: tuple[Standing, ...]
    """Of every worker."""
    options: tuple[float, ...]
    """Of every worker, `WorkerNumbers.options`."""
    values: tuple[float, ...]
    """Of every worker, `WorkerNumbers.values`."""
    may_be_nonfinite: bool
    """Whether it is to be asked closely if a gradient is not finite."""

    @property
    def loss(self) -> float:
        """Sum of the losses, in the order of the tree."""
        return _add(self.losses)

    @property
    def weight(self) -> float:
        """Sum of the weights, in the order of the tree."""
        return _add(self.weights)


@final
class StepTable:
    """The table of one step, as one worker fills it.

    Args:
        world: The workers.
        num_shards: Number of shards of the run.
        device: Where the losses are; filling does not wait for it.
    """

    def __init__(self, world: World, num_shards: int, device: torch.device) -> None:
        self._world = world
        self._num_shards = num_shards
        self._rows = torch.zeros((num_shards + world.world_size, _NUM_COLUMNS), dtype=torch.float64, device=device)

    def note_loss(self, shard: int, loss: Tensor, weight: float) -> None:
        """Note the mean loss of a shard and its weight, which is more than zero."""
        self._rows[shard, 0] = loss.detach().double() * weight
        self._rows[shard, 1] = weight

    def share(self, batch: ShardedBatch, standing: Standing, numbers: WorkerNumbers) -> StepSums:
        """Return what all workers noted (collective).

        Args:
            batch: The batch of this worker.
            standing: What else it tells.
            numbers: What there is to compare between workers.
        """
        place = (batch.cursor.epoch, batch.cursor.step, zlib.crc32(f"{batch.source} {batch.content}".encode()))
        known = torch.tensor([*place, *_to_numbers(standing), numbers.options], dtype=torch.float64)
        mine = self._rows[self._num_shards + self._world.rank]
        mine[: len(known)] = known.to(self._rows.device)
        mine[-2], mine[-1] = numbers.values, numbers.gradients
        if self._world.group is not None:
            dist.all_reduce(self._rows, group=self._world.group)
        rows: list[list[float]] = self._rows.tolist()
        shards, workers = rows[: self._num_shards], rows[self._num_shards :]
        return StepSums(
            losses=tuple(row[0] for row in shards),
            weights=tuple(row[1] for row in shards),
            places=tuple(tuple(row[:3]) for row in workers),
            standings=tuple(_from_numbers(row[3:-3]) for row in workers),
            options=tuple(row[-3] for row in workers),
            values=tuple(row[-2] for row in workers),
            may_be_nonfinite=not all(math.isfinite(row[-1]) for row in workers),
        )


def _to_numbers(standing: Standing) -> tuple[float, ...]:
    asked = standing.asked
    flags = standing.ran_inner, standing.written, standing.has_new_layout, standing.wants_stop
    return standing.seconds, asked.epoch, asked.step, *flags


def _from_numbers(numbers: Sequence[float]) -> Standing:
    seconds, epoch, step, ran_inner, written, has_new_layout, wants_stop = numbers
    return Standing(
        seconds=seconds,
        asked=Cursor(int(epoch), int(step)),
        ran_inner=bool(ran_inner),
        written=int(written),
        has_new_layout=bool(has_new_layout),
        wants_stop=bool(wants_stop),
    )


def _add(values: Sequence[float]) -> float:
    leaves = {(shard, shard + 1): value for shard, value in enumerate(values)}
    return add_in_tree_order(leaves, len(values), lambda left, right: left + right)
