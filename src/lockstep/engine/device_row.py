"""What only an asynchronous device knows of a step: losses, weights that are tensors, whether gradients are finite.

[Note: host facts and device facts] To read what a device holds is to wait for the device. So where the model is on an
asynchronous one, the step table (`lockstep.engine.step_table`) holds what the hosts know and travels over the group's
CPU backend, and the rest is one row on the device:

    host      backward launched .. table exchanged .. update launched | forward, backward of the next step .. row read
    device    ......... forward ....... backward ....... row added up, judged .... update, unless it is bad .... forward

Whether the step is bad is computed on the device, from numbers that are the same on all workers, and decides there
whether the update takes effect. The row is copied to pinned memory, and read when the next step has been launched: then
the device has work to do while the host waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm import World, calls_for, raise_if_broken
from lockstep.errors import GroupError, PeerLostError
from lockstep.shards import add_in_tree_order


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """What the row of a step holds, on the host."""

    losses: tuple[float, ...]
    """Of every shard, loss times weight."""
    weights: tuple[float, ...]
    """Of every shard, where any weight is a tensor on the device; else zeros."""
    has_bad_gradient: bool
    """Whether a gradient is not finite; False if that was not looked at."""
    norm: float
    """The norm of the gradient; 0 if it was not computed."""
    values: Sequence[tuple[Sequence[float], Sequence[float]]]
    """Of further values: value * weight of every shard, and its weights."""


@final
class DeviceRow:
    """The row of one step after the other, in memory that is kept.

    | loss * weight of each shard | weight of each shard | 0 or NaN for the gradients | norm of the gradient |
    | value * weight of each shard | weight of each shard | for each further value
    """

    def __init__(self, world: World, num_shards: int, device: torch.device) -> None:
        self.device = device
        self._world = world
        self._num_shards = num_shards
        self._lay_out(0)

    def _lay_out(self, num_values: int) -> None:
        num_shards = self._num_shards
        self._row = torch.zeros(2 * num_shards * (1 + num_values) + 2, dtype=torch.float64, device=self.device)
        self._judged, values = self._row[: 2 * num_shards + 2], self._row[2 * num_shards + 2 :]
        self._losses, self._weights = self._row[:num_shards], self._row[num_shards : 2 * num_shards]
        self._gradients, self._norm = self._judged[-2], self._judged[-1]
        self._values = values.view(num_values, 2, num_shards)
        self._on_host = torch.zeros(len(self._row), dtype=torch.float64, pin_memory=True)

    def begin(self, num_values: int) -> None:
        """Begin with a step, in which there is a place for so many values besides the losses."""
        if num_values != len(self._values):
            self._lay_out(num_values)
        self._row.zero_()

    @torch.no_grad()
    def add_loss(self, shard: int, loss: Tensor, weight: float | Tensor) -> None:
        """Add the mean loss of a shard and its weight (local).

        It is computed at once: the loss may lie in memory that the next forward overwrites, as outputs of CUDA graphs.
        """
        if isinstance(weight, Tensor):
            weight = weight.detach().double()
            self._weights[shard].copy_(weight)
            self._losses[shard].copy_(torch.where(weight > 0, loss.detach().double() * weight, 0.0))
        else:
            self._losses[shard].copy_(loss.detach().double() * weight)

    @torch.no_grad()
    def add_value(self, place: int, shard: int, weighted: float | Tensor, weight: float | Tensor) -> None:
        """Add a further value of a shard (local); `place` is that of its name."""
        for target, number in zip(self._values[place, :, shard].unbind(), (weighted, weight), strict=True):
            target.copy_(number) if isinstance(number, Tensor) else target.fill_(number)

    def note_gradients(self, largest: Tensor) -> None:
        """Note the largest magnitude of this worker's part of the gradients; not a number, or infinite, is bad."""
        self._gradients.copy_(largest * 0.0)

    def note_norm(self, norm: Tensor) -> None:
        """Note the norm of the gradient, the same on all workers (local)."""
        self._norm.copy_(norm)

    def exchange(self) -> None:
        """Add up the rows of all workers; the current stream waits, the host does not (collective)."""
        if self._world.group is None or self._world.world_size == 1:
            return
        with calls_for("adding up the losses"):
            work = dist.all_reduce(self._row, group=self._world.group, async_op=True)
        assert work is not None
        work.wait()

    def total_weight(self, known: Sequence[float]) -> Tensor:
        """Return the sum of the weights, in the order of the tree, on the device (local; after `exchange`).

        In `known`, a weight below zero is one that is on the device only.
        """
        for shard, weight in enumerate(known):
            if weight >= 0:
                self._weights[shard].fill_(weight)
        leaves = {(shard, shard + 1): weight for shard, weight in enumerate(self._weights.unbind())}
        return add_in_tree_order(leaves, self._num_shards, torch.add)

    def is_bad(self, total_weight: Tensor | None) -> Tensor:
        """Return, on the device, whether no update can be made; `total_weight` is None where no weight is there."""
        is_bad = ~self._judged.isfinite().all()
        if total_weight is not None:
            is_bad = is_bad | ~(total_weight > 0) | (self._weights < 0).any()
        return is_bad

    def start_copy(self) -> Callable[[], RowValues]:
        """Start to copy the row to the host; return what waits for the copy and reads it (local).

        It must be called before the row of the next step is copied. It raises a PeerLostError if a rank was lost.
        """
        on_host = self._on_host  # of this step: the next one may have other values, and so another row
        on_host.copy_(self._row, non_blocking=True)
        event = torch.Event(self._row.device)
        event.record()

        def read() -> RowValues:
            event.synchronize()
            _raise_if_lost(self._world.group)  # a reduction that was ended because a rank was lost leaves any value
            return self._read(on_host.tolist())

        return read

    def _read(self, row: list[float]) -> RowValues:
        num_shards = self._num_shards
        of_gradients, norm = row[2 * num_shards : 2 * num_shards + 2]
        values = [row[start : start + num_shards] for start in range(2 * num_shards + 2, len(row), num_shards)]
        return RowValues(
            losses=tuple(row[:num_shards]),
            weights=tuple(row[num_shards : 2 * num_shards]),
            has_bad_gradient=not math.isfinite(of_gradients),
            norm=norm,
            values=list(zip(values[::2], values[1::2], strict=True)),
        )


def _raise_if_lost(group: ProcessGroup | None) -> None:
    try:
        raise_if_broken(group)
    except PeerLostError:
        raise
    except GroupError:
        pass  # it was destroyed since, in order
