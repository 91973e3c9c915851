"""What loss functions return: the loss of each shard with its weight, and further values, averaged over the shards.

    table    of each shard the loss and weight, how many values it has, a number for their names; and of each value
             whose name is known, value * weight and weight
    answers  the values of a step in which there are new names, in the second exchange; from the next step on the table
             has a place for them, or the row on the device

Means are computed in the order of the tree: they have the same bits on any number of workers.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from lockstep.data import ShardedBatch
from lockstep.devices.transfer import is_asynchronous
from lockstep.engine.batches import name_step
from lockstep.engine.device_row import DeviceRow, RowValues
from lockstep.engine.step_table import ON_DEVICE, CurrentStep, Rows, ShardColumn, StepPart, WeightedLosses
from lockstep.errors import LossError
from lockstep.shards import sum_in_tree_order

ShardValues = Mapping[str, tuple[float | Tensor, float | Tensor]]
"""The values of a slice by name: each a mean and its weight."""


@final
class ShardLosses(StepPart):
    """The losses of the shards, and their weights; `row` gets what is on an asynchronous device."""

    def __init__(self, row: DeviceRow | None) -> None:
        self._row = row
        self._losses: dict[int, float | Tensor] = {}
        self._weights: dict[int, float | Tensor] = {}
        self._columns = ShardColumn(lambda: self._losses), ShardColumn(lambda: self._weights)
        self.shard_columns = self._columns

    def begin(self, _step: CurrentStep) -> None:
        self._losses, self._weights = {}, {}

    def add(self, shard: int, loss: Tensor, weight: float | Tensor) -> None:
        """Add the mean loss of a shard and its weight: more than zero, or a tensor on an asynchronous device."""
        if self._row is None:
            self._losses[shard], self._weights[shard] = _weighted(_exact(loss), weight), weight
            return
        self._row.add_loss(shard, loss, weight)
        self._losses[shard], self._weights[shard] = 0.0, ON_DEVICE if isinstance(weight, Tensor) else weight

    def check(self, step: CurrentStep, rows: Rows) -> None:
        losses, weights = map(rows.of_shards, self._columns)
        step.losses = WeightedLosses(losses, weights)
        if not step.losses.has_weights_on_device:
            step.problem = find_bad_loss(step.losses, step.batch)


def _exact(value: Any) -> float | Tensor:
    """Return a number in double precision, at once where that costs nothing; else it stays on its device."""
    if isinstance(value, Tensor):
        return value.detach().double() if is_asynchronous(value.device) else float(value.item())
    return float(value)


def _weighted(mean: float | Tensor, weight: float | Tensor) -> float | Tensor:
    """Return mean * weight; 0 where the weight is, whatever the mean: it is one of nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, mean * weight, 0.0)
    return mean * weight if weight > 0 else 0.0


def find_bad_loss(found: WeightedLosses, batch: ShardedBatch) -> str:
    """Return which loss is not finite, in words; empty if none is. `LossError` if no loss has a weight."""
    for shard, (loss, weight) in enumerate(zip(found.losses, found.weights, strict=True)):
        if not (math.isfinite(loss) and math.isfinite(weight)):
            rank = next(rank for rank, shards in enumerate(batch.ranges) if shard in shards)
            return (
                f"The loss of shard {shard}, run by rank {rank}, is {loss / weight if weight else loss} at "
                f"{name_step(batch.cursor)}: the model has diverged, or a sample is not finite. Try a smaller "
                'learning rate, or max_grad_norm; nonfinite="skip" leaves such steps out.'
            )
    if not any(weight > 0 for weight in found.weights):
        raise LossError(
            f"The summed weight of the losses is {found.weight} at {name_step(batch.cursor)}, expected more than "
            "zero: no shard had anything to learn from. (LS507)"
        )
    return ""


@final
class StepValues(StepPart):
    """Averages the values of steps; where there is a `row`, those whose names are known are in it."""

    def __init__(self, num_shards: int, row: DeviceRow | None) -> None:
        self._num_shards = num_shards
        self._row = row
        self._found: dict[int, dict[str, tuple[float | Tensor, float | Tensor]]] = {}
        self._numbers = ShardColumn(lambda: {shard: _number_of(each) for shard, each in self._found.items() if each})
        self._names: dict[int, list[str]] = {}
        self._places: dict[str, tuple[ShardColumn, ShardColumn]] = {}
        self._of_step: list[str] = []
        self._sums: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        self.shard_columns = [self._numbers]

    def begin(self, _step: CurrentStep) -> None:
        self._found, self._sums, self._of_step = {}, {}, []
        if self._row is not None:
            self._row.begin(len(self._places))

    def add(self, shard: int, values: ShardValues) -> None:
        """Add the values of a shard (local)."""
        if not values:
            return
        self._found[shard] = found = {name: (_exact(mean), _exact(weight)) for name, (mean, weight) in values.items()}
        if self._row is not None:
            for place, name in enumerate(self._places):
                if name in found:
                    self._row.add_value(place, shard, _weighted(*found[name]), found[name][1])

    def check(self, step: CurrentStep, rows: Rows) -> None:
        numbers = rows.of_shards(self._numbers)
        if not any(numbers):
            return
        used = [shard for shard, number in enumerate(numbers) if number or step.losses.weights[shard]]
        first = used[0]
        odd = next((shard for shard in used if numbers[shard] != numbers[first]), None)
        if odd is not None:
            raise LossError(
                f"The loss function returned values of other names for shard {odd} than for shard {first}. Return the "
                "same names for every slice; a value that a slice does not have gets weight 0: (0.0, 0). No parameter "
                "was changed. (LS507)"
            )
        self._of_step = self._names.get(int(numbers[first]), [])
        if not self._of_step:
            step.ask("adding up the values that the loss functions returned", self._send, self._receive)
        elif self._row is None:
            for name in self._of_step:
                sums, weights = map(rows.of_shards, self._places[name])
                self._sums[name] = sums, weights

    def means(self) -> Callable[[RowValues | None], dict[str, float]]:
        """Return what computes the means of this step by name; it is given the values of the row, if there is one."""
        names, sums, places = self._of_step, self._sums, list(self._places)

        def compute(row: RowValues | None) -> dict[str, float]:
            if row is None or sums:
                return {name: _mean(*sums[name]) for name in names}
            return {name: _mean(*row.values[places.index(name)]) for name in names}

        return compute

    def _send(self) -> dict[int, dict[str, tuple[float, float]]]:
        return {
            shard: {name: (float(_weighted(*each)), float(each[1])) for name, each in values.items()}
            for shard, values in self._found.items()
        }

    def _receive(self, found: list[dict[int, dict[str, tuple[float, float]]]]) -> None:
        """Take the values of this step, and let their names have a place in the table from the next one on."""
        of_shards = {shard: values for each in found for shard, values in each.items()}
        self._of_step = names = sorted(next(iter(of_shards.values())))
        self._names[_number_of(names)] = names
        for name in names:
            if name not in self._places:
                self._places[name] = self._make_columns(name)
            pairs = [of_shards.get(shard, {}).get(name, (0.0, 0.0)) for shard in range(self._num_shards)]
            sums, weights = zip(*pairs, strict=True)
            self._sums[name] = sums, weights
        if self._row is None:
            self.shard_columns = [self._numbers, *chain.from_iterable(self._places.values())]

    def _make_columns(self, name: str) -> tuple[ShardColumn, ShardColumn]:
        def read() -> Iterator[tuple[int, tuple[float | Tensor, float | Tensor]]]:
            return ((shard, values[name]) for shard, values in self._found.items() if name in values)

        return (
            ShardColumn(lambda: {shard: _weighted(*each) for shard, each in read()}),
            ShardColumn(lambda: {shard: weight for shard, (_, weight) in read()}),
        )


def _mean(sums: Sequence[float], weights: Sequence[float]) -> float:
    weight = sum_in_tree_order(weights)
    return sum_in_tree_order(sums) / weight if weight else math.nan


def check_values(values: Mapping[Any, Any], weight: float | Tensor) -> ShardValues:
    """Return the values of a slice, each with its weight: that of the loss, unless it has one of its own."""
    found: dict[str, tuple[float | Tensor, float | Tensor]] = {}
    for name, value in values.items():
        parts = value if isinstance(value, tuple) else (value, weight)
        if len(parts) != 2 or not all(map(_is_number, parts)):  # noqa: PLR2004 - mean and weight
            raise LossError(
                f"The loss function returned {name!r} as a {type(value).__name__}, expected the mean of a slice as one "
                "number, or a pair of it and its weight. (LS507)"
            )
        mean, own_weight = (each.detach().reshape(()) if isinstance(each, Tensor) else each for each in parts)
        found[str(name)] = mean, own_weight
    return found


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)  # NumPy's numbers too


def _number_of(names: Iterable[str]) -> int:
    """Return a number for names, which a float64 holds exactly; 0 for none alone."""
    ordered = sorted(names)
    return len(ordered) << 32 | zlib.crc32("\n".join(ordered).encode())
