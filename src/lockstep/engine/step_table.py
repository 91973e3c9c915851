"""What all workers exchange once per step besides gradients: losses, and the status of each worker.

    row s < num_shards       loss * weight of shard s, its weight, its number of other values, a number for their names
    row num_shards + r       of worker r: epoch, step, a number for its loader, its `WorkerStatus`, its `WorkerNumbers`

A row is written by one worker and zero on all others, so adding up in any order is exact, and all workers draw the same
conclusions from the same numbers.

Where the model is on an asynchronous device the table holds what the hosts know, and a row on the device the rest:
[Note: host facts and device facts] in `lockstep.engine.device_row`.

[Note: the commit point] A worker sends the table when it has all that it needs to finish the step: every reduced
gradient, and shard 0's buffers. So a worker that has read the whole table knows that all workers can finish the step. A
worker that has failed sends the table too, and says so in its status: no worker waits for a table that is never sent.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World, raise_if_broken
from lockstep.data import Cursor, ShardedBatch
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.device_row import DeviceRow
from lockstep.reduce.status import has_cpu_backend
from lockstep.shards import sum_in_tree_order

_BEGINNING: Final = Cursor()


class Failure(IntEnum):
    """Whether a worker can finish the step."""

    NONE = 0
    """It can."""
    OWN = 1
    """It has raised an error of its own."""
    REDUCTION = 2
    """The reduction has raised an error, as on all other workers."""
    UNUSABLE = 3
    """An earlier update has failed in the middle, and no checkpoint was loaded since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    failure: Failure = Failure.NONE
    num_steps: int = 0
    seconds: float = 0.0
    """How long a shard took; 0 where it was not measured."""
    last_requested: Cursor = _BEGINNING
    """The furthest step that its loader has requested."""
    has_nested_backward: bool = False
    written: int = 0
    """The number of the first parameter that was written before the update, counted from 1; 0 for none."""
    has_new_layout: bool = False
    """Whether shard 0 has left other buffers than the step began with; on rank 0."""
    stop_requested: bool = False
    has_hooks: bool = False
    planned: int = 0
    """The generation of workers that it knows to be planned after this step; 0 for none."""
    end_requested: bool = False
    """Whether a callback on it has ended the training."""


_STATUS_COLUMNS: Final = 12
_NUM_COLUMNS: Final = 3 + _STATUS_COLUMNS + 3
ON_DEVICE: Final = -1.0
"""Stands for a weight that is on the device; a weight is not negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNumbers:
    """What the workers compare in each step."""

    options: int = 0
    """A number for the optimizer's options."""
    values: Tensor | int = 0
    """A number for the values of the parameters, where they were written since the last update."""
    gradients: Tensor | int = 0
    """A number that is not finite if a gradient is not, on this worker or, where it looks at a part, another. On an
    asynchronous device it is in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What the table holds when all workers' rows are in it."""

    losses: tuple[float, ...]
    """Of every shard, loss times weight; 0 for one without samples, and where they are on the device."""
    weights: tuple[float, ...]
    """Of every shard; `ON_DEVICE` for one whose weight is a tensor on an asynchronous device."""
    values: tuple[tuple[float, float], ...]
    """Of every shard, how many values it has besides its loss, and a number for their names."""
    places: tuple[tuple[float, ...], ...]
    """Of every worker: what identifies its batch: epoch, step, and a number for its loader."""
    statuses: tuple[WorkerStatus, ...]
    options: tuple[float, ...]
    """Of every worker, `WorkerNumbers.options`."""
    parameters: tuple[float, ...]
    """Of every worker, `WorkerNumbers.values`."""
    may_be_nonfinite: bool
    """Whether the gradients must be searched for one that is not finite."""

    @property
    def has_hooks(self) -> bool:
        return any(status.has_hooks for status in self.statuses)

    @property
    def has_weights_on_device(self) -> bool:
        return ON_DEVICE in self.weights

    @property
    def loss(self) -> float:
        return sum_in_tree_order(self.losses)

    @property
    def weight(self) -> float:
        return sum_in_tree_order(self.weights)

    @property
    def mean_loss(self) -> float:
        """The weighted mean of the losses; NaN where nothing has a weight."""
        weight = self.weight
        return self.loss / weight if weight else math.nan


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """What the workers have exchanged in a step besides gradients and buffers; the same on all."""

    sums: StepSums
    means: Callable[[], dict[str, float]] | None
    """Reads the means of further numbers that the loss function returned; None for none."""


@final
class StepTable:
    """The table of one step, as one worker fills it in.

    `row` gets what the device knows; None where the model is on the CPU, or the host waits for the device.
    """

    def __init__(self, world: World, num_shards: int, row: DeviceRow | None) -> None:
        self._world = world
        self._num_shards = num_shards
        self._row = row
        self._losses: dict[int, tuple[float | Tensor, float | Tensor]] = {}
        self._values: dict[int, tuple[int, int]] = {}
        self._place: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._status = WorkerStatus()
        self._numbers = WorkerNumbers()

    def add_loss(self, shard: int, loss: Tensor, weight: float | Tensor) -> None:
        """Add the mean loss of a shard and its weight: more than zero, or a tensor on an asynchronous device."""
        if self._row is None:
            # A number at once where that costs nothing; from a device it is read when all shards are launched.
            found = loss.detach().double() if is_asynchronous(loss.device) else loss.item()
            weighted = found * weight
            if isinstance(weight, Tensor):
                weighted = torch.where(weight > 0, weighted, 0.0)
            self._losses[shard] = weighted, weight
            return
        self._row.add_loss(shard, loss, weight)
        self._losses[shard] = 0.0, ON_DEVICE if isinstance(weight, Tensor) else weight

    def note_values(self, shard: int, count: int, names: int) -> None:
        """Note how many values a shard has besides its loss, and a number for their names."""
        if count:
            self._values[shard] = count, names

    def fill_in(self, batch: ShardedBatch, status: WorkerStatus, numbers: WorkerNumbers) -> None:
        source = zlib.crc32(f"{batch.source} {batch.identity}".encode())
        self._place = (batch.cursor.epoch, batch.cursor.step, source)
        self._status, self._numbers = status, numbers

    def fill_in_failure(self, failure: Failure, num_steps: int, written: int) -> None:
        self._losses.clear()
        self._values.clear()
        self._status = WorkerStatus(failure=failure, num_steps=num_steps, written=written)
        self._numbers = WorkerNumbers()

    def exchange(self) -> StepSums:
        """Return what all workers have filled in (collective). [Note: the commit point]."""
        values = self._add_up(self._write_rows())
        shards, workers = values[: self._num_shards], values[self._num_shards :]
        return StepSums(
            losses=tuple(row[0] for row in shards),
            weights=tuple(row[1] for row in shards),
            values=tuple((row[2], row[3]) for row in shards),
            places=tuple(tuple(row[:3]) for row in workers),
            statuses=tuple(_to_status(row[3:-3]) for row in workers),
            options=tuple(row[-3] for row in workers),
            parameters=tuple(row[-2] for row in workers),
            may_be_nonfinite=not all(math.isfinite(row[-1]) for row in workers),
        )

    def _write_rows(self) -> list[list[float]]:
        numbers, own = self._numbers, self._num_shards + self._world.rank
        rows = [[0.0] * _NUM_COLUMNS for _ in range(self._num_shards + self._world.world_size)]
        for shard, loss_and_weight in self._losses.items():
            rows[shard][:2] = map(float, loss_and_weight)
        for shard, count_and_names in self._values.items():
            rows[shard][2:4] = count_and_names
        # A number of the values is a tensor in few steps alone: those before which something has written parameters.
        gradients = float(numbers.gradients) if self._row is None else 0.0
        rows[own] = [*self._place, *_to_numbers(self._status), numbers.options, float(numbers.values), gradients]
        return rows

    def _add_up(self, rows: list[list[float]]) -> list[list[float]]:
        group = self._world.group
        if group is None:
            return rows
        table = torch.tensor(rows, dtype=torch.float64)
        if self._row is not None and not has_cpu_backend(group):  # then there is no other way, and reading it waits
            table = table.to(self._row.device)
        dist.all_reduce(table, group=group)
        values: list[list[float]] = table.tolist()
        raise_if_broken(group)  # a reduction that was ended because a rank was lost leaves any value
        return values


def _to_numbers(status: WorkerStatus) -> tuple[float, ...]:
    last_requested = status.last_requested
    flags = status.has_nested_backward, status.written, status.has_new_layout, status.stop_requested, status.has_hooks
    place = last_requested.epoch, last_requested.step
    return float(status.failure), status.num_steps, status.seconds, *place, *flags, status.planned, status.end_requested


def _to_status(numbers: Sequence[float]) -> WorkerStatus:
    failure, num_steps, seconds, epoch, step, has_nested_backward, written, has_new_layout, *flags = numbers
    stop_requested, has_hooks, planned, end_requested = flags
    return WorkerStatus(
        failure=Failure(int(failure)),
        num_steps=int(num_steps),
        seconds=seconds,
        last_requested=Cursor(int(epoch), int(step)),
        has_nested_backward=bool(has_nested_backward),
        written=int(written),
        has_new_layout=bool(has_new_layout),
        stop_requested=bool(stop_requested),
        has_hooks=bool(has_hooks),
        planned=int(planned),
        end_requested=bool(end_requested),
    )
