"""`Trainer`: the step of data-parallel training over shards, and evaluation.

cursor -> batch of the loader -> for each shard of this worker, in order:
                                     seed from (seed, epoch, step, shard)
                                     forward -> loss * weight -> backward     gradients add up in the buckets
          last shard's backward -> reduction over the workers                 (overlaps with that backward)
          gradients / summed weight -> clip -> optimizer.step -> cursor + 1
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import state_digest
from lockstep.comm import World, broadcast_tensors, current_world
from lockstep.data import Cursor, ShardedBatch, ShardedLoader, Slice
from lockstep.devices import to_device
from lockstep.errors import CheckpointError, LossError
from lockstep.reduce import BucketLimits, Reducer, ReducerOptions, TrainedModel, check_same_model
from lockstep.shards import derive_seed, shard_range
from lockstep.train.buffers import BuffersOfShard0
from lockstep.train.metrics import Mean, add_means
from lockstep.train.reproducibility import seed_generators, set_deterministic

MetricValues = tuple[float | Tensor, float] | Mapping[str, tuple[float | Tensor, float]]
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
"""`loss(model, batch)`: the mean loss of a slice (scalar), or the pair of it and its weight (say, tokens)."""
Metric = Callable[[nn.Module, Any], MetricValues]
"""`metric(model, batch)`: a sum over a slice and its weight, or several by name."""


class Scheduler(Protocol):
    """What the trainer asks of a learning-rate scheduler."""

    def step(self) -> None:
        """Set the next learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; the same on every worker."""

    loss: float
    """Weighted mean loss of the global batch."""
    weight: float
    """Summed weight of the global batch: samples, unless the loss says otherwise."""
    cursor: Cursor
    """The step that was taken."""


@final
class Trainer:
    """Train a model on sharded batches, with every worker of a group or alone.

    Constructing is collective: each worker must, with the same model and arguments. Rank 0's parameters and buffers
    become everybody's.

    Args:
        model: On the device where it is to train. Not wrapped in DistributedDataParallel.
        optimizer: Over the model's parameters.
        loss: `loss(model, batch)`, called for each shard with the collated slice on the model's device.
        num_shards: Number of shards of the run, at least the number of workers; the loader's must be the same.
        seed: Of every random state in a step.
        scheduler: Learning-rate scheduler; stepped once per step. For one that steps per epoch, leave it out and
            step it in the loop.
        max_grad_norm: Clip the gradient's 2-norm to this.
        deterministic: Deterministic operators; see `set_deterministic`. It holds for the whole process.
        bucket_limits: Sizes of the gradient buckets.
        world: The workers; None for the default group, or alone.

    Raises:
        ParameterMismatchError: Workers have different models.
        TypeError: The model is wrapped already.
        ValueError: More workers than shards, nothing to train, or an optimizer of parameters that are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss,
        num_shards: int,
        seed: int = 0,
        scheduler: Scheduler | LRScheduler | None = None,
        max_grad_norm: float | None = None,
        deterministic: bool = True,
        bucket_limits: BucketLimits | None = None,
        world: World | None = None,
    ) -> None:
        parameters = _check_model(model)
        _check_optimizer(optimizer, model)
        self.world = current_world() if world is None else world
        shard_range(self.world.rank, self.world.world_size, num_shards)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.num_shards = num_shards
        self.seed = seed
        self.cursor = Cursor()
        self.global_step = 0
        self._loss = loss
        self._max_grad_norm = max_grad_norm
        self._device = parameters[0][1].device
        set_deterministic(deterministic)
        self._reducer: Reducer | None = None
        if self.world.group is not None:
            trained = TrainedModel(model)
            check_same_model(trained, self.world)
            broadcast_tensors(trained.tensors(), self.world.group)
            options = ReducerOptions(limits=bucket_limits or BucketLimits(), average=False)
            self._reducer = Reducer(trained, self.world, options)

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective: every worker calls, with its part of the same batch).

        The model stays in the mode in which it is, training mode unless you changed it. The global generators of
        Python, NumPy and torch are seeded anew for each shard.

        Raises:
            LossError: The loss is not a scalar or not finite, or the summed weight is not positive.
            ValueError: The batch was cut into another number of shards, or its slices are not this worker's.
        """
        self._check_batch(batch)
        self.model.zero_grad(set_to_none=True)  # all of it, also what the optimizer does not train
        total, weight = self._backward(batch)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if weight != batch.num_samples:
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            torch._foreach_div_(gradients, weight / batch.num_samples)
        if self._max_grad_norm is not None:
            self._clip(trained, self._max_grad_norm, batch)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.cursor = batch.cursor.advance(batch.num_steps)
        self.global_step += 1
        return StepResult(loss=total / weight, weight=weight, cursor=batch.cursor)

    @torch.no_grad()
    def evaluate(self, loader: ShardedLoader, metric: Metric) -> dict[str, Mean]:
        """Sum `metric` over a data set, each sample counted once (collective).

        Sums are kept per shard and added in shard order, so the result has the same bits on any number of workers.
        The model is in evaluation mode meanwhile.

        Returns:
            The means by name; a metric that returns a bare pair is called `"metric"`.
        """
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        sums: dict[int, dict[str, Mean]] = {}
        try:
            for batch in loader.epoch(0):
                for part in batch.slices:
                    self._seed("evaluate", batch, part)
                    values = metric(self.model, to_device(part.data, self._device))
                    _add_values(sums.setdefault(part.shard, {}), values)
        finally:
            # Each its own: a model that is fine-tuned may have parts in evaluation mode.
            for module, training in modes.items():
                module.training = training
        by_shard: dict[int, dict[str, Mean]] = {}
        for gathered in self.world.gather_objects(sums):
            by_shard.update(gathered)
        ordered = [by_shard[shard] for shard in sorted(by_shard)]
        names = list(dict.fromkeys(name for shard in ordered for name in shard))
        return {name: add_means(shard[name] for shard in ordered if name in shard) for name in names}

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, 64 hex digits; the same on every worker (local)."""
        return state_digest(_tensors(self.model))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to go on, on any number of workers (local)."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "epoch": self.cursor.epoch,
            "step": self.cursor.step,
            "global_step": self.global_step,
            "num_shards": self.num_shards,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned (local: every worker calls, with the same state).

        Raises:
            CheckpointError: The state belongs to another model, another number of shards or another seed.
        """
        for name, mine in (("num_shards", self.num_shards), ("seed", self.seed)):
            if state[name] != mine:
                raise CheckpointError(
                    f"The state was saved with {name} {state[name]}, and this run has {mine}: it would not go on as "
                    f"it began. Set {name} to {state[name]}."
                )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"The state does not fit this model and optimizer. {error}") from error
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.cursor = Cursor(state["epoch"], state["step"])
        self.global_step = state["global_step"]

    def _check_batch(self, batch: ShardedBatch) -> None:
        if batch.num_shards != self.num_shards:
            raise ValueError(
                f"The batch is cut into {batch.num_shards} shards and the trainer has {self.num_shards}: give the "
                "loader and the trainer the same num_shards."
            )
        mine = shard_range(self.world.rank, self.world.world_size, self.num_shards)
        for part in batch.slices:
            if part.shard not in mine:
                raise ValueError(
                    f"The batch holds shard {part.shard}, which is not one of rank {self.world.rank}'s: make the "
                    "loader in the worker that uses it, after the process group."
                )

    def _backward(self, batch: ShardedBatch) -> tuple[float, float]:
        """Run forward and backward of this worker's shards and reduce; return the global loss sum and weight.

        Losses are scaled by weight / samples of the global batch, at most 1 where weights count samples, so that half
        precision does not overflow.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        has_reduced = self._reducer is None
        buffers = BuffersOfShard0(self.model, num_slices=len(batch.slices))
        for position, part in enumerate(batch.slices):
            is_last = position == len(batch.slices) - 1
            loss, weight = self._forward(batch, part)
            if weight > 0:  # else there is nothing to learn from, and the mean of nothing may be NaN
                sums += torch.stack([loss.detach().double() * weight, torch.full_like(sums[0], weight)])
                if self._reducer is not None:
                    self._reducer.synchronizes = is_last
                    self._reducer.mark(loss)
                    has_reduced = is_last
                (loss * (weight / batch.num_samples)).backward()
            buffers.after(part.shard, is_last=is_last)
        if self._reducer is not None and not has_reduced:
            self._reducer.synchronizes = True
            self._reducer.reduce_without_backward()
        self._share_buffers()
        return self._sum_over_workers(sums, batch)

    def _forward(self, batch: ShardedBatch, part: Slice) -> tuple[Tensor, float]:
        self._seed("shard", batch, part)
        result = self._loss(self.model, to_device(part.data, self._device))
        loss, weight = result if isinstance(result, tuple) else (result, part.num_samples)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise LossError(
                f"The loss function returned {_describe(loss)}, expected a tensor of one number that depends on the "
                "model's parameters."
            )
        return loss.reshape(()), float(weight)

    def _seed(self, purpose: str, batch: ShardedBatch, part: Slice) -> None:
        seed_generators(derive_seed(purpose, self.seed, batch.cursor.epoch, batch.cursor.step, part.shard))

    def _share_buffers(self) -> None:
        """Give every worker shard 0's buffers, which rank 0 has. [Note: buffers of shard 0]."""
        buffers = list(self.model.buffers())  # listed anew: a forward may put another tensor in a buffer's place
        if self.world.group is not None and buffers:
            broadcast_tensors(buffers, self.world.group)

    def _clip(self, parameters: list[nn.Parameter], max_norm: float, batch: ShardedBatch) -> None:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        if not math.isfinite(norm):
            raise LossError(
                f"The gradient's norm is {norm.item()} at {_place(batch)}, although the loss is finite. "
                "No parameter was changed."
            )

    def _sum_over_workers(self, sums: Tensor, batch: ShardedBatch) -> tuple[float, float]:
        if self.world.group is not None:
            dist.all_reduce(sums, group=self.world.group)
        total, weight = sums.tolist()
        if not math.isfinite(total):
            raise LossError(
                f"The loss is {total} at {_place(batch)}: the model has diverged. Try a smaller learning rate, or "
                "max_grad_norm. No parameter was changed."
            )
        if not weight > 0:
            raise LossError(f"The summed weight of the losses is {weight} at {_place(batch)}, expected more than zero.")
        return total, weight


def _place(batch: ShardedBatch) -> str:
    return f"epoch {batch.cursor.epoch}, step {batch.cursor.step} (counted from 0)"


def _check_model(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model is {_describe(model)}, expected a torch.nn.Module.")
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "DistributedDataParallel":
        raise TypeError("The model is wrapped already. Give the trainer the module itself: it reduces by itself.")
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("The model has no parameter that requires a gradient: there is nothing to train.")
    return parameters


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ValueError(
            f"The optimizer holds {strangers} parameters that are not the model's: their gradients would not be "
            "reduced. Make the optimizer from model.parameters(), after the model is on its device; a loss with "
            "parameters of its own belongs into the model."
        )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _add_values(sums: dict[str, Mean], values: MetricValues) -> None:
    named = values if isinstance(values, Mapping) else {"metric": values}
    for name, (total, weight) in named.items():
        new = Mean(total=float(total), weight=float(weight))
        sums[name] = add_means([sums[name], new]) if name in sums else new


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
