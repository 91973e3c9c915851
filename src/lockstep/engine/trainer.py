"""`Trainer`: the step of data-parallel training over shards, and evaluation.

cursor -> batch of the loader -> for each shard of this worker, largest subtree first:
                                     seed from (seed, epoch, step, shard)
                                     forward -> loss * weight -> backward     gradients add up in tree order
          last shard's backward -> reduction over the workers                 (overlaps with that backward)
          losses and weights of all shards, told to all                       a loss that is not finite stops all alike
          seed from (seed, epoch, step)                                       for whoever draws until the next step
          gradients / summed weight -> clip -> optimizer.step -> cursor + 1
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import state_digest
from lockstep.comm import World, broadcast_tensors, join_world
from lockstep.data import Cursor, ShardedBatch, ShardedLoader, Slice
from lockstep.devices.transfer import to_device
from lockstep.engine.agreement import Agreement
from lockstep.engine.arguments import Arguments, check_arguments, check_same_terms, describe_options
from lockstep.engine.balance import Balancer, Stopwatch
from lockstep.engine.batches import DataWatch, check_cut, check_sync_batchnorm, place_of
from lockstep.engine.buffers import BuffersOfShard0, without_repeats
from lockstep.engine.checks import Conditions, ModelWatch, check_fingerprints, warn_of_other_conditions
from lockstep.engine.evaluation import MetricValues, evaluation_mode, is_torchmetrics, sum_by_shard, update_in_order
from lockstep.engine.fingerprint import Fingerprint, take_fingerprint
from lockstep.engine.gradients import are_finite, name_nonfinite
from lockstep.engine.guards import ScheduleWatch, guard_steps
from lockstep.engine.losses import explained_second_backward, read_loss
from lockstep.engine.restoring import (
    UnsavedBuffers,
    check_options,
    check_state,
    class_name,
    own_options,
    undone_on_error,
    warn_of_late_scheduler,
    warn_of_other_options,
)
from lockstep.engine.side_effects import ParameterWatch, plain_attributes, warn_of_counters
from lockstep.engine.state_file import (
    LoadedState,
    Scheduler,
    heard_by_all,
    pack_state,
    read_together,
    share_out,
    unpack_state,
    write_together,
)
from lockstep.engine.step_checks import OrderWatch, check_places, check_written, find_bad_loss
from lockstep.engine.step_table import Standing, StepSums, StepTable, WorkerNumbers
from lockstep.errors import (
    GroupError,
    LockstepError,
    LossError,
    ParameterMismatchError,
    ReductionError,
)
from lockstep.processes.reproducibility import reseed_generators, set_deterministic
from lockstep.reduce import BucketLimits, ShardReducer, TrainedModel, check_same_model
from lockstep.shards import ShardTask, derive_seed

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
"""`loss(model, batch)`: the mean loss of a slice (scalar), or the pair of it and its weight (say, tokens)."""
Metric = Callable[[nn.Module, Any], MetricValues]
"""`metric(model, batch)`: a sum over a slice and its weight, or several by name."""

_OF_THE_REDUCTION = (GroupError, ReductionError, ParameterMismatchError)
"""Errors that every worker has, or that there is nobody left to tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; the same on every worker."""

    loss: float
    """Weighted mean loss of the global batch, in the order of the tree: the same bits on any number of workers."""
    weight: float
    """Summed weight of the global batch: samples, unless the loss says otherwise."""
    cursor: Cursor
    """The step that was taken."""
    is_skipped: bool = False
    """Whether the loss was not finite and nothing was changed but the cursor and the learning rate."""
    should_stop: bool = False
    """Whether some worker was asked to stop (`Trainer.request_stop`): all are told so after the same step. Not after
    the last step of an epoch, unless it is the only one: what a loop does between two epochs (step a scheduler,
    evaluate) belongs to it."""


@final
class Trainer:
    """Train a model on sharded batches, with every worker of a group or alone.

    For a fixed seed, data, number of shards and number of threads per worker, parameters and buffers have the same bits
    after every step on any number of workers: gradients are added in the order of a tree over shards ([Note: reduction
    order] in `lockstep.shards.tree`), and all that is random follows from (seed, epoch, step, shard), or for the
    optimizer and whatever else draws between two steps, from (seed, epoch, step).

    State that a forward leaves behind belongs in buffers, of which every shard of a step sees the same and shard 0's
    are kept; a forward that writes parameters is refused.

    Constructing is collective: each worker must, with the same model and arguments. Rank 0's parameters and buffers
    become everybody's.

    Args:
        model: On the device where it is to train. Not wrapped in DistributedDataParallel.
        optimizer: Over the model's parameters.
        loss: `loss(model, batch)`, called for each shard with the collated slice on the model's device. Returns the
            slice's mean loss, or a pair of a mean and its weight, say over tokens; mixed precision goes in there:
            `with torch.autocast("cuda", torch.bfloat16): ...`.
        num_shards: Number of shards of the run, at least the number of workers; the loader's must be the same.
        seed: Of every random state in a step.
        scheduler: Learning-rate scheduler; stepped once per step. For one that steps per epoch, leave it out and
            step it in the loop.
        scaler: Scales the loss for float16, and leaves steps out whose gradients overflow; on all workers alike.
        max_grad_norm: Clip the gradient's 2-norm to this.
        nonfinite: What becomes of a step whose loss or gradient is not finite: "stop" raises an error; "skip" leaves
            parameters, buffers and optimizer as they were, on all workers alike, and goes on.
        balance: "even": every worker runs the same number of shards, or one more. "speed": shards move from slow
            workers to fast ones while training; no bit of the result depends on who runs which.
        deterministic: Deterministic operators; see `set_deterministic`. It holds for the whole process.
        bucket_limits: Sizes of the gradient buckets.
        world: The workers; None for the default group, which is made if torchrun or another launcher started
            this worker and it is not there, or alone.

    Raises:
        ParameterMismatchError: Workers have different models.
        PeerFailedError: Another worker was given something wrong.
        TypeError: The model is wrapped already, or an argument is of the wrong type.
        ValueError: More workers than shards, nothing to train, gradients of another dtype than their parameter's, an
            optimizer of parameters that are not the model's, a SyncBatchNorm where workers run several shards, or
            arguments that differ between workers.
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
        scaler: GradScaler | None = None,
        max_grad_norm: float | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        balance: Literal["even", "speed"] = "even",
        deterministic: bool = True,
        bucket_limits: BucketLimits | None = None,
        world: World | None = None,
    ) -> None:
        self.world = join_world() if world is None else world
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        arguments = Arguments(
            model=model,
            optimizer=optimizer,
            loss=loss,
            num_shards=num_shards,
            seed=seed,
            scheduler=scheduler,
            scaler=scaler,
            max_grad_norm=max_grad_norm,
            nonfinite=nonfinite,
            balance=balance,
            deterministic=deterministic,
        )
        terms = check_arguments(arguments, self.world)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.num_shards = int(num_shards)
        self.seed = int(seed)
        self.cursor = Cursor()
        self.global_step = 0
        self._loss = loss
        self._max_grad_norm = max_grad_norm
        self._skips_nonfinite = nonfinite == "skip"
        self._device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
        self._data = DataWatch()
        self._balancer = Balancer() if balance == "speed" and self.world.world_size > 1 else None
        self._stopwatch = Stopwatch(self._device)
        trained = TrainedModel(model)
        check_same_model(trained, self.world)
        check_same_terms(terms)
        set_deterministic(deterministic)
        check_fingerprints(self.fingerprint(), self.world)
        self._conditions = Conditions()
        if self.world.group is not None:
            broadcast_tensors(list(map(without_repeats, trained.tensors())), self.world.group)
        self._gradients = ShardReducer(trained, self.world, num_shards, bucket_limits or BucketLimits())
        self._gradients.on_last_gradient(self._stopwatch.lap_if_only)
        self._buffers = BuffersOfShard0(model, self.world, self._device)
        self._watch = ParameterWatch(model)
        self._model_watch = ModelWatch(model, optimizer, trained)
        self._order = OrderWatch(lambda adds_once: self._gradients.trust(adds_once=adds_once))
        self._wants_stop = False
        self._guard = guard_steps(optimizer, self)
        self._schedule = ScheduleWatch(scheduler)
        self._agreement = Agreement(model, optimizer, self.world)
        self._unsaved = UnsavedBuffers(model)

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective: every worker calls, with its part of the same batch).

        The model stays in the mode in which it is, training mode unless you changed it. The global generators of
        Python, NumPy and torch are seeded anew for each shard, and once more before the update, alike on every worker.
        An error on one worker is an error on all; no parameter was changed then.

        Raises:
            LossError: The loss is not a scalar, it or its gradient is not finite or depends on no parameter, or the
                summed weight is not positive; or the model writes its parameters, or begins to use reentrant
                checkpoints after its first step.
            ParameterMismatchError: Parameters have other values than on another worker.
            ReductionError: Another worker has raised an error in this step.
            TypeError: The batch is not one of a ShardedLoader.
            ValueError: The batch was cut into another number of shards, is of another loader or another step than the
                other workers', or is not where a restored run stands; the model was changed between steps; or the
                optimizer's options are not the other workers'.
        """
        table = StepTable(self.world, self.num_shards, self._device)
        try:
            check_cut(batch, self.num_shards, self.world)
            check_sync_batchnorm(batch, self.model)
            self._data.check(batch, self.cursor)
            self._model_watch.check()
            self._conditions.check()
            self._schedule.check()
            self.model.zero_grad(set_to_none=True)  # all of it, also what the optimizer does not train
            self._run_shards(batch, table)
        except _OF_THE_REDUCTION:
            raise
        except Exception:
            with suppress(LockstepError):  # what the others say to that is not the cause
                self._gradients.fail()
            raise
        with batch.assignment.held():
            sums = table.share(batch, self._stand(batch), self._take_numbers())
            check_places(sums)
            if self._balancer is not None:
                seconds, asked = zip(*((each.seconds, each.asked) for each in sums.standings), strict=True)
                self._balancer.note(batch, seconds, max(asked))
        self._buffers.share(is_new_layout=sums.standings[0].has_new_layout)
        reseed_generators(derive_seed("update", self.seed, batch.cursor.epoch, batch.cursor.step))
        check_written(sums, self._watch.names, batch)
        self._order.check(sums, batch)
        self._agreement.check_options(sums.options, place_of(batch.cursor))
        self._agreement.check_values(sums.values, place_of(batch.cursor))
        problem = self._find_problem(batch, sums) or self._update(batch, sums)
        if problem:
            if not self._skips_nonfinite:
                raise LossError(f"{problem} No parameter was changed.")
            warnings.warn(f"{problem} The step is skipped on every worker.", stacklevel=2)
            self._buffers.go_back()
        if self.scheduler is not None:
            self.scheduler.step()
            self._schedule.note()
        self.cursor = batch.cursor.advance(batch.num_steps)
        self.global_step += 1
        self._data.note(batch)
        loss = sums.loss / sums.weight if sums.weight else math.nan
        is_end = self.cursor.step == 0 and batch.num_steps > 1
        return StepResult(
            loss=loss,
            weight=sums.weight,
            cursor=batch.cursor,
            is_skipped=bool(problem),
            should_stop=any(standing.wants_stop for standing in sums.standings) and not is_end,
        )

    def request_stop(self) -> None:
        """Have the steps from now on tell every worker to stop, in `StepResult.should_stop` (local).

        For a signal that asks to end, which reaches the workers at different moments, or only one of them: all leave
        the loop after the same step.

            signal.signal(signal.SIGTERM, lambda number, frame: trainer.request_stop())
            ...
            if trainer.step(batch).should_stop:
                trainer.save("run.ckpt")
                return  # under ls.launch; in a script of lockstep run or torchrun: sys.exit(75)
        """
        self._wants_stop = True

    @torch.no_grad()
    def evaluate(self, loader: ShardedLoader, metric: Metric | Any) -> Any:
        """Sum `metric` over a data set, each sample counted once (collective).

        Sums are kept per shard and added in shard order, so the result has the same bits on any number of workers.
        The model is in evaluation mode meanwhile.

        Args:
            loader: The data; its batches are pairs (input, target) if the metric is of torchmetrics.
            metric: `metric(model, batch)`, which returns a sum over a slice and its weight, or several by name; or a
                Metric or MetricCollection of torchmetrics, which sees all predictions in the order of the data.

        Returns:
            The means by name, each a `Mean`; a metric that returns a bare pair is called `"metric"`. With torchmetrics
            what its `compute` returns, on the CPU.

        Raises:
            PeerFailedError: The metric has raised an error on another worker.
            TypeError: Not a ShardedLoader, or the metric returned neither a sum and a weight nor several by name.
            ValueError: Workers evaluate on different data, or a weight is below zero or not a number.
        """
        if not isinstance(loader, ShardedLoader):
            raise TypeError(
                f"evaluate was given a {type(loader).__name__}, expected a ShardedLoader: it counts each sample once "
                "over all workers. Make one of the data set."
            )
        try:
            with evaluation_mode(self.model):
                if is_torchmetrics(metric):
                    return update_in_order(metric, loader, self._predict, self.world)
                return sum_by_shard(loader, partial(self._measure, metric), self.world)
        finally:  # what a worker has drawn depends on which shards it ran
            reseed_generators(derive_seed("evaluated", self.seed, self.cursor.epoch, self.cursor.step))

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, 64 hex digits; the same on every worker (local)."""
        return state_digest(_tensors(self.model))

    def fingerprint(self) -> Fingerprint:
        """Return what the digest depends on besides code and data, as this process is set now (local)."""
        return take_fingerprint(self._device, num_shards=self.num_shards, seed=self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to go on, on any number of workers (local).

        `save` writes it into a file. To go on, load it into a trainer that was made in the same way, and begin where it
        stands:

            for epoch in range(trainer.cursor.epoch, num_epochs):
                for batch in loader.epoch(epoch, trainer.cursor.step):
                    trainer.step(batch)
        """
        unsaved = self._unsaved.changed()
        if unsaved:
            warnings.warn(
                f"The steps have changed {', '.join(unsaved)}, which is not part of the model's state: a run that goes "
                "on from it begins with other values there, and may end in others. Register it with persistent=True, "
                "unless it only keeps what is computed anyway.",
                stacklevel=2,
            )
        return self._take_state()

    def save(
        self,
        path: str | Path,
        *,
        scheduler: Scheduler | LRScheduler | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> Path:
        """Write all that the run needs to go on into one file, and return its path (collective: every worker calls).

        Rank 0 writes; when this returns the file is whole and on the disk. It has the format that `lockstep train`
        writes, docs/checkpoint-format.md.

        Args:
            path: The file; an existing directory for one in it that is named by the step, `step-00000240.ckpt`.
            scheduler: One that you step yourself, if it is to go on as well.
            metrics: What was measured, by name; `load` returns it.

        Raises:
            CheckpointError: On all workers: the file cannot be written. What was under `path` before is still there.
            ValueError: The trainer steps a scheduler by itself already.
        """
        own = self._own_scheduler(scheduler)
        made = self.scheduler if own is None else own
        if self.world.rank == 0:
            warn_of_late_scheduler(own, self.cursor)
        return write_together(
            self.world,
            Path(path),
            lambda: pack_state(self.state_dict(), made, None, metrics),
        )

    def load(self, path: str | Path, *, scheduler: Scheduler | LRScheduler | None = None) -> LoadedState:
        """Go on from a file of `save` or `lockstep train`, on any number of workers (collective: every worker calls).

        Each worker reads the file, every byte is checked, and all compare what they have read. Then begin where the run
        stands, in the middle of an epoch too; this loop is right for a new trainer as well:

            for epoch in range(trainer.cursor.epoch, num_epochs):
                for batch in loader.epoch(epoch, trainer.cursor.step):
                    trainer.step(batch)

        The optimizer goes on with the options of the file, its learning rate among them; where it was made with others
        that is warned of. To change one, set it in `optimizer.param_groups` after this.

        Args:
            path: The file; a directory for the newest whole checkpoint in it, with a warning for each that is broken.
            scheduler: The one that `save` was given.

        Raises:
            CheckpointError: On all workers: the file is missing or damaged, is not the same on all of them, or belongs
                to another model, optimizer or run. Nothing was changed.
            ValueError: The trainer steps a scheduler by itself already.
        """
        own = self._own_scheduler(scheduler)
        file, checkpoint = read_together(self.world, Path(path))
        options = describe_options(self.optimizer)

        def restore() -> None:
            state, made = share_out(unpack_state(checkpoint), has_scheduler=self.scheduler is not None, own=own)
            self.load_state_dict(state)
            if own is not None and made is not None:
                own.load_state_dict(made)

        heard_by_all(self.world, restore, "loading a checkpoint")
        if self.world.rank == 0:
            warn_of_other_options(options, describe_options(self.optimizer))
        metrics = checkpoint.manifest.metrics
        return LoadedState(path=file, cursor=self.cursor, global_step=self.global_step, metrics=metrics)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned (local: every worker calls, with the same state).

        What the bits of the rest of the run depend on, and was otherwise when the state was saved, is warned of.

        Raises:
            CheckpointError: The state belongs to another model or optimizer, another number of shards or another seed,
                or to a run with a scheduler or scaler where this has none, or the other way round. Nothing was changed.
        """
        check_state(state, self._take_state())
        options = own_options(self.optimizer)
        with undone_on_error(self.model, self.optimizer):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            check_options(self.optimizer, options)
            if self.scaler is not None:
                self.scaler.load_state_dict(state["scaler"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
                self._schedule.note()
        self.cursor = Cursor(state["epoch"], state["step"])
        self.global_step = state["global_step"]
        self._data.restore(state.get("loader"))
        if self.world.rank == 0:  # one warning is enough
            warn_of_other_conditions(state.get("fingerprint"), self.fingerprint())

    def _own_scheduler(self, scheduler: Scheduler | LRScheduler | None) -> Scheduler | LRScheduler | None:
        if scheduler is not None and self.scheduler is not None:
            raise ValueError(
                "The trainer steps a scheduler, whose state is a part of its own. Leave scheduler= out; it is for one "
                "that you step yourself."
            )
        return scheduler

    def _take_state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": class_name(self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scheduler_class": class_name(self.scheduler),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "epoch": self.cursor.epoch,
            "step": self.cursor.step,
            "global_step": self.global_step,
            "num_shards": self.num_shards,
            "seed": self.seed,
            "loader": self._data.source,
            "fingerprint": self.fingerprint().to_dict(),
        }

    # -- During a step -------------------------------------------------------------------------------------------------

    def _run_shards(self, batch: ShardedBatch, table: StepTable) -> None:
        """Run forward and backward of this worker's shards, and reduce (collective)."""
        slices = {part.shard: part for part in batch.slices}
        turns = self._gradients.begin(batch.ranges)
        self._buffers.begin(num_slices=len(turns), may_go_back=self._skips_nonfinite)
        if self.num_shards > 1:
            self._watch.begin()
        attributes = plain_attributes(self.model) if self._order.is_first and self.world.rank == 0 else {}
        self._stopwatch.start()
        for number, turn in enumerate(turns, start=1):
            is_last = number == len(turns)
            if turn.shard in slices:
                self._run_shard(batch, slices[turn.shard], turn, table)
            self._gradients.end(turn)
            self._buffers.after(turn.shard, is_last=is_last)
            if number == 1 and attributes:
                warn_of_counters(attributes, plain_attributes(self.model))
            if not is_last:  # the end of the last one waits for others
                self._stopwatch.lap(number)

    def _run_shard(self, batch: ShardedBatch, part: Slice, turn: ShardTask, table: StepTable) -> None:
        """Run one shard's forward and backward.

        Losses are scaled by weight / samples of the global batch, at most 1 where weights count samples, so that half
        precision does not overflow.
        """
        loss, weight = self._forward(batch, part)
        if not weight > 0:  # nothing to learn from, and the mean of nothing may be NaN
            return
        table.note_loss(part.shard, loss, weight)
        scaled = loss * (weight / batch.num_samples)
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        self._gradients.mark(scaled, turn)
        with explained_second_backward():
            scaled.backward()

    def _forward(self, batch: ShardedBatch, part: Slice) -> tuple[Tensor, float]:
        self._seed("shard", batch, part)
        return read_loss(self._loss(self.model, to_device(part.data, self._device)), part)

    def _seed(self, purpose: str, batch: ShardedBatch, part: Slice) -> None:
        reseed_generators(derive_seed(purpose, self.seed, batch.cursor.epoch, batch.cursor.step, part.shard))

    # -- After the reduction -------------------------------------------------------------------------------------------

    def _stand(self, batch: ShardedBatch) -> Standing:
        return Standing(
            seconds=self._stopwatch.seconds_per_shard(),
            asked=batch.assignment.asked,
            ran_inner=self._gradients.ran_inner,
            written=self._watch.find_written() if self.num_shards > 1 else 0,
            has_new_layout=self.world.rank == 0 and self._buffers.has_new_layout,
            wants_stop=self._wants_stop,
        )

    def _held_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _take_numbers(self) -> WorkerNumbers:
        """Return what the workers compare in this step (local)."""
        gradients: Tensor | int = 0
        if self.scaler is None and self._max_grad_norm is None:  # else a scaler looks, or the norm tells
            gradients = self._gradients.sum_to_suspect(self._device)
        return WorkerNumbers(
            options=self._agreement.options_number(), values=self._agreement.values_number(), gradients=gradients
        )

    def _find_problem(self, batch: ShardedBatch, sums: StepSums) -> str:
        """Return what is wrong with the losses of a step, or the gradients, in words; empty if nothing is."""
        bad_loss = find_bad_loss(sums, batch)
        if not bad_loss and sums.may_be_nonfinite and not are_finite(self._held_parameters()):
            return self._explain_gradient(batch)
        return bad_loss

    def _explain_gradient(self, batch: ShardedBatch, norm: Tensor | None = None) -> str:
        name, place = name_nonfinite(self.model.named_parameters()), place_of(batch.cursor)
        what = "The gradient" if norm is None else f"The gradient's norm is {norm.item()}"
        if name:
            return (
                f"{what}{' is' if norm is None else ', for it is'} not finite in {name} at {place}, although "
                "the loss is finite. Look for a square root or logarithm of zero, or a division by it, in the model or "
                'the loss; or try a smaller learning rate. nonfinite="skip" leaves such steps out.'
            )
        return f"{what} at {place}, although losses and gradients are finite. Try a smaller learning rate."

    def _update(self, batch: ShardedBatch, sums: StepSums) -> str:
        """Divide, clip and update; return what is wrong with the gradients instead, in words."""
        trained = list(self._held_parameters())
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if not gradients:
            raise LossError(
                f"No parameter of the optimizer has a gradient at {place_of(batch.cursor)}: the losses depend on none "
                "of them. Compute the loss from what the model, which the loss function is given, returns."
            )
        if sums.weight != batch.num_samples:
            torch._foreach_div_(gradients, sums.weight / batch.num_samples)
        if self.scaler is not None and self._max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(trained, self._max_grad_norm)
            if self.scaler is None and not math.isfinite(norm):
                return self._explain_gradient(batch, norm)
        with self._guard.allowed():
            if self.scaler is None:
                self.optimizer.step()
            else:  # it leaves the step out where a gradient is not finite, and lowers its scale
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self._agreement.note_update()
        return ""

    # -- Evaluation ----------------------------------------------------------------------------------------------------

    def _measure(self, metric: Metric, batch: ShardedBatch, part: Slice) -> MetricValues:
        self._seed("evaluate", batch, part)
        return metric(self.model, to_device(part.data, self._device))

    def _predict(self, batch: ShardedBatch, part: Slice) -> tuple[Any, Any]:
        self._seed("evaluate", batch, part)
        data = to_device(part.data, self._device)
        if not (isinstance(data, tuple | list) and len(data) == 2):  # noqa: PLR2004
            raise TypeError(
                f"The loader's batches are of type {type(data).__name__}, and an object of torchmetrics needs pairs "
                "(input, target). For others give a function metric(model, batch)."
            )
        return self.model(data[0]), data[1]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
