"""What loss functions return: the loss of each shard with its weight, and further values, averaged over the shards.

    table    of each shard the loss and weight, how many values it has, a number for their names; and of each value
             whose name is known, value * weight and weight
    answers  the values of a step in which there are new names, in the second exchange; from the next step on the table
             has a place for them, or the row on the device

Means are computed in the order of the tree: they have the same bits on any number of workers.

[Note: host facts and device facts] To read what a device holds is to wait for the device. So where the model is on an
asynchronous one, the step table (`lockstep.engine.step_table`) holds what the hosts know and travels over the group's
CPU backend, and the rest is one row on the device: losses, weights that are tensors, whether gradients are finite.

    host      backward launched .. table exchanged .. update launched | forward, backward of the next step .. row read
    device    ......... forward ....... backward ....... row added up, judged .... update, unless it is bad .... forward

Whether the step is bad is computed on the device, from numbers that are the same on all workers, and decides there
whether the update takes effect. The row is copied to pinned memory, and read when the next step has been launched: then
the device has work to do while the host waits.

[Note: a shard that has nothing to learn from] In a plain loop samples of weight zero are in the batch like others: the
parameters that they use have a gradient, of zeros if nothing else uses them, and an optimizer with weight decay or
momentum updates these. The shard's own mean is often one of nothing, 0 / 0, whose backward gives NaN. So it is replaced
by a sum of zeros over the same parameters.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple, SupportsFloat, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World, calls_for, raise_if_broken
from lockstep.data import ShardedBatch, Slice
from lockstep.devices.transfer import is_asynchronous, record_event
from lockstep.engine.batches import name_step
from lockstep.engine.step_table import (
    ON_DEVICE,
    CurrentStep,
    Rows,
    ShardColumn,
    StepPart,
    WeightedLosses,
    mean_in_tree_order,
)
from lockstep.errors import GroupError, LossError, PeerLostError
from lockstep.means import Mean
from lockstep.shards import add_in_tree_order
from lockstep.torch_private.autograd import tensor_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
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
        self.gradients, self.norm = self._judged[-2], self._judged[-1]
        self._values = values.view(num_values, 2, num_shards)
        self._on_host = torch.zeros(len(self._row), dtype=torch.float64, pin_memory=True)

    def begin(self, num_values: int) -> None:
        if num_values != len(self._values):
            self._lay_out(num_values)
        self._row.zero_()

    @torch.no_grad()
    def add_loss(self, shard: int, loss: Tensor, weight: float | Tensor) -> None:
        """Compute at once: the loss may lie in memory that the next forward overwrites, as outputs of CUDA graphs."""
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

    def exchange(self) -> None:
        """Add up the rows of all workers; the current stream waits, the host does not (collective)."""
        if self._world.group is None or self._world.world_size == 1:
            return
        with calls_for("adding up the losses"):
            work = dist.all_reduce(self._row, group=self._world.group, async_op=True)
        assert work is not None
        work.wait()

    def total_weight(self, known: Sequence[float]) -> Tensor:
        """Return the sum of the weights in tree order, after `exchange`; one below zero in `known` is on the device."""
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
        event = record_event(self._row.device)

        def read() -> RowValues:
            event.synchronize()
            try:
                raise_if_broken(
                    self._world.group
                )  # a reduction that was ended because a rank was lost leaves any value
            except PeerLostError:
                raise
            except GroupError:
                pass  # it was destroyed since, in order
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
            self._losses[shard], self._weights[shard] = times_weight(_exact(loss), weight), weight
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


def times_weight(mean: float | Tensor, weight: float | Tensor) -> float | Tensor:
    """Return mean * weight; 0 where the weight is, whatever the mean: it is one of nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, mean * weight, 0.0)
    return mean * weight if weight > 0 else 0.0


def find_bad_loss(found: WeightedLosses, batch: ShardedBatch) -> str:
    """Return which loss is not finite, in words; empty if none is. `LossError` if no loss has a weight."""
    for shard, (loss, weight) in enumerate(zip(found.losses, found.weights, strict=True)):
        if not (math.isfinite(loss) and math.isfinite(weight)):
            rank = next(rank for rank, shards in enumerate(batch.ranges) if shard in shards)
            why = (
                "those of others are finite. A sample is not finite, or the targets of this shard are all ignored, and "
                "its mean is 0 / 0: then let the loss return ls.Mean(sum, count)"
                if math.isnan(loss) and any(map(math.isfinite, found.losses))
                else "the model has diverged, or a sample is not finite. Try a smaller learning rate, or max_grad_norm"
            )
            return (
                f"The loss of shard {shard}, run by rank {rank}, is {loss / weight if weight else loss} at "
                f'{name_step(batch.cursor)}: {why}; nonfinite="skip" leaves such steps out.'
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
        if not values:
            return
        self._found[shard] = found = {name: (_exact(mean), _exact(weight)) for name, (mean, weight) in values.items()}
        if self._row is not None:
            for place, name in enumerate(self._places):
                if name in found:
                    self._row.add_value(place, shard, times_weight(*found[name]), found[name][1])

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
                return {name: mean_in_tree_order(*sums[name]) for name in names}
            return {name: mean_in_tree_order(*row.values[places.index(name)]) for name in names}

        return compute

    def _send(self) -> dict[int, dict[str, tuple[float, float]]]:
        return {
            shard: {name: (float(times_weight(*each)), float(each[1])) for name, each in values.items()}
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
            ShardColumn(lambda: {shard: times_weight(*each) for shard, each in read()}),
            ShardColumn(lambda: {shard: weight for shard, (_, weight) in read()}),
        )


def check_values(values: Mapping[Any, Any], weight: float | Tensor) -> ShardValues:
    """Return the values of a slice, each with its weight: that of the loss, unless it has one of its own."""
    found: dict[str, tuple[float | Tensor, float | Tensor]] = {}
    for name, value in values.items():
        parts = value if isinstance(value, tuple) else (value, weight)
        if isinstance(value, Mean):
            parts = (_mean_of(value), value.weight)
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
    ordered = sorted(names)
    return len(ordered) << 32 | zlib.crc32("\n".join(ordered).encode())


class SliceLoss(NamedTuple):
    loss: Tensor
    weight: float | Tensor
    values: ShardValues


def read_loss(result: Any, part: Slice) -> SliceLoss:
    """Return a slice's mean loss and its weight: samples, unless it returned another; one on a device stays there."""
    found = split_loss(result, part.num_samples, f"shard {part.shard}")
    if not found.loss.requires_grad:
        raise _wrong_loss(found.loss)
    return found


def split_loss(result: Any, num_samples: int, where: str) -> SliceLoss:
    """Return what a loss function has returned for a slice of so many samples; `where` is which, in words."""
    if isinstance(result, SliceLoss):  # of a loss whose divisor is known
        loss, given, others = result.loss, result.weight, result.values
    else:
        loss, given, others = _take_apart(result, num_samples)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _wrong_loss(loss)
    weight = _read_weight(given, where)
    return SliceLoss(
        loss=loss.reshape(()) if loss.ndim else loss,
        weight=weight,
        values=check_values(others, weight) if others else {},
    )


def _take_apart(result: Any, num_samples: int) -> tuple[Any, Any, Mapping[Any, Any]]:
    others: Mapping[Any, Any] = {}
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise LossError(
                f"The loss function returned a dictionary of {', '.join(map(str, result)) or 'nothing'}, expected one "
                'with the mean loss of the slice, or a pair of it and its weight, as "loss". (LS507)'
            )
        others = {name: value for name, value in result.items() if name != "loss"}
        result = result["loss"]
    if isinstance(result, Mean):
        return _mean_of(result), result.weight, others
    if not isinstance(result, tuple):
        return result, num_samples, others
    if len(result) != 2:  # noqa: PLR2004 - loss and weight
        raise LossError(
            f"The loss function returned a tuple of {len(result)}, expected the mean loss of a slice, or a pair of "
            "it and its weight. (LS507)"
        )
    return *result, others


def _mean_of(found: Mean) -> Any:
    """Return total / weight; of the weight 0 the total, which is 0 then and has gradients of 0, not NaN."""
    total, weight = found
    return total / (torch.where(weight > 0, weight, 1) if isinstance(weight, Tensor) else weight or 1)


def _wrong_loss(loss: object) -> LossError:
    return LossError(
        f"The loss function returned {_describe(loss)}, expected a tensor of one number that depends on the "
        "model's parameters. (LS507)"
    )


def begin_backward_at(loss: Tensor) -> Tensor:
    """Return a tensor with the value of a loss at which a backward begins, and which no hook was put on yet."""
    return loss.view_as(loss) if loss.grad_fn is None or tensor_hooks(loss) else loss


def gradient_of_loss(loss: Tensor, weight: float | Tensor, num_samples: int) -> Tensor:
    """Return the gradient with which the backward of a scalar loss begins: weight / samples of the global batch.

    It is at most 1 where weights count samples, so that half precision does not overflow. The gradients have the bits
    that `loss * (weight / num_samples)` gives them, in less time.
    """
    if not isinstance(weight, Tensor):
        return torch.full_like(loss, weight / num_samples, requires_grad=False)
    return (weight.double() / num_samples).to(torch.promote_types(loss.dtype, torch.float32)).to(loss.dtype)


def zero_over_parameters(loss: Tensor) -> Tensor | None:
    """Return a zero whose backward gives zeros, or None. [Note: a shard that has nothing to learn from]."""
    zeros = [leaf.sum() * 0.0 for leaf in _find_leaves(loss)]
    if not zeros:
        return None
    first, *others = (zero.to(dtype=loss.dtype, device=loss.device) for zero in zeros)
    return sum(others, start=first)


def _read_weight(weight: Any, where: str) -> float | Tensor:
    # Plain numbers first: to ask for a protocol takes longer than all else here.
    is_number = isinstance(weight, (int, float, SupportsFloat)) and not (
        isinstance(weight, Tensor) and weight.numel() != 1
    )
    if not is_number:
        raise LossError(
            f"The loss of {where} has as its weight {_describe(weight)}, expected one number: how much the "
            "slice's mean counts, say its samples or tokens. (LS507)"
        )
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise LossError(
            f"The weight of the loss of {where} depends on parameters, and no gradient would go through it. Weights "
            "are numbers of the data: return weight.detach(). (LS507)"
        )
    if isinstance(weight, Tensor) and is_asynchronous(weight.device):
        return weight.reshape(())
    number = float(weight)
    if number < 0 or not math.isfinite(number):
        raise LossError(f"The loss of {where} has weight {number}, expected zero or more, and finite. (LS507)")
    return number


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def _find_leaves(loss: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
