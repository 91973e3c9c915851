"""What loss functions return besides the loss, averaged over the shards of a step.

    table     each shard's row says how many values it has, and a number for their names
    values    one more message, only if a shard has some: of each shard and value, value * weight and weight

A row is written by one worker and zero on all others, and means are computed in the order of the tree: they have the
same bits on any number of workers.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World, calls_for, raise_if_broken
from lockstep.errors import LossError
from lockstep.shards import sum_in_tree_order

ShardValues = Mapping[str, tuple[float | Tensor, float | Tensor]]
"""The values of a slice by name: each a mean and its weight."""


@final
class StepValues:
    """Averages the values of steps."""

    def __init__(self, world: World, num_shards: int, device: torch.device) -> None:
        self._world = world
        self._num_shards = num_shards
        self._device = device
        self._names: dict[int, tuple[str, ...]] = {}
        self._found: dict[int, ShardValues] = {}

    def begin(self) -> None:
        self._found = {}

    def add(self, shard: int, values: ShardValues) -> tuple[int, int]:
        """Add the values of a shard; return how many they are, and a number for their names (local)."""
        if not values:
            return 0, 0
        self._found[shard] = values
        return len(values), _number_of(sorted(values))

    def exchange(
        self, found: Sequence[tuple[float, float]], weights: Sequence[float]
    ) -> Callable[[], dict[str, float]] | None:
        """Return what reads the means by name, which may wait for the device; None for none (collective if any).

        `found` is what `add` has returned for each shard, on whichever worker; zeros for one that was not run.
        `weights` are of the losses; 0 for a shard without samples.
        """
        if not any(count for count, _ in found):
            return None
        used = [shard for shard, (count, _) in enumerate(found) if count or weights[shard]]
        first = used[0]
        odd = next((shard for shard in used if found[shard] != found[first]), None)
        if odd is not None:
            raise LossError(
                f"The loss function returned values of other names for shard {odd} than for shard {first}. Return the "
                "same names for every slice; a value that a slice does not have gets weight 0: (0.0, 0). No parameter "
                "was changed. (LS507)"
            )
        names = self._find_names(int(found[first][1]))
        sums = self._fill_in(names)
        if self._world.group is not None:
            with calls_for("adding up the values that the loss functions returned"):
                dist.all_reduce(sums, group=self._world.group)
            raise_if_broken(self._world.group)
        return _Means(names, sums)

    def _find_names(self, number: int) -> tuple[str, ...]:
        """Return the names; a worker without a slice in this step has none (collective when they are new)."""
        if number not in self._names:
            mine = tuple(sorted(next(iter(self._found.values()), ())))
            everywhere = self._world.gather_objects(mine)
            self._names[number] = next(names for names in everywhere if names)
        return self._names[number]

    @torch.no_grad()
    def _fill_in(self, names: Sequence[str]) -> Tensor:
        sums = torch.zeros(self._num_shards, len(names), 2, dtype=torch.float64, device=self._device)
        for shard, values in self._found.items():
            for place, name in enumerate(names):
                mean, weight = (torch.as_tensor(each, dtype=torch.float64).detach() for each in values[name])
                mean, weight = mean.to(self._device), weight.to(self._device)
                sums[shard, place, 0] = torch.where(weight > 0, mean * weight, 0.0)
                sums[shard, place, 1] = weight
        return sums


@final
@dataclass(slots=True)
class _Means:
    """Computes means when they are asked for, once; a dataclass, so that it may be sent to another worker."""

    names: Sequence[str]
    sums: Tensor | None
    """Of each shard and value, value * weight and weight; None when the means are computed."""
    means: dict[str, float] = field(default_factory=dict)

    def __call__(self) -> dict[str, float]:
        if self.sums is not None:
            rows: list[list[list[float]]] = self.sums.tolist()
            self.sums = None
            for place, name in enumerate(self.names):
                total, weight = (sum_in_tree_order([row[place][column] for row in rows]) for column in (0, 1))
                self.means[name] = total / weight if weight else math.nan
        return self.means


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


def _number_of(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(names).encode())
