"""`Trainer`: what a training loop calls. The state of the run is in `RunState`, and `StepEngine` takes its steps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.comm import World, current_world, join_world
from lockstep.data import Cursor, ShardedBatch, ShardedLoader
from lockstep.engine.arguments import TrainerArguments, check_arguments
from lockstep.engine.checks import warn_of_other_conditions
from lockstep.engine.continued import Continued
from lockstep.engine.determinism import DeterminismSwitches
from lockstep.engine.evaluation import Metric, evaluate
from lockstep.engine.fingerprint import Fingerprint
from lockstep.engine.recovery import Recovery
from lockstep.engine.run_state import RunState
from lockstep.engine.saving import load_state, save_state
from lockstep.engine.shard_runs import Loss
from lockstep.engine.state_file import LoadedState, Scheduler
from lockstep.engine.step_engine import StepEngine
from lockstep.engine.step_phase import StepPhase
from lockstep.engine.step_result import StepResult
from lockstep.engine.verification import verify
from lockstep.reduce import BucketLimits
from lockstep.reduce.optimizer_options import Description

Result = TypeVar("Result")


@final
class Trainer:
    """Train a model on sharded batches, with every worker of a group or alone.

    For a fixed seed, data, number of shards and number of threads per worker, parameters and buffers have the same bits
    after every step on any number of workers: gradients are added in the order of a tree over shards ([Note: reduction
    order] in `lockstep.shards.tree`), and all that is random follows from (seed, epoch, step, shard), or for the
    optimizer and whatever else draws between two steps, from (seed, epoch, step).

    State that a forward leaves behind belongs in buffers, of which every shard of a step sees the same and shard 0's
    are kept; a forward that writes parameters is refused.

    Constructing is collective, with the same model and arguments on each worker. Rank 0's parameters and buffers become
    those of all. It sets torch's switches for deterministic operators, for the whole process: see `deterministic`, and
    `close`, which restores them.

    Args:
        model: On the device where it is to train. Not wrapped in DistributedDataParallel.
        optimizer: Over the model's parameters; or several by name, no two with a parameter in common.
        loss: `loss(model, batch)`, called for each shard with the collated slice on the model's device. Returns the
            slice's mean loss, or a pair of a mean and its weight, say over tokens; mixed precision goes in there:
            `with torch.autocast("cuda", torch.bfloat16): ...`. A weight that is a tensor on a GPU is not read: where a
            slice may have weight 0, its gradient must be finite, as with `/ count.clamp(min=1)`.
            It may return `{"loss": ..., "kl": ...}` instead: `StepResult.values` has the mean of each further number,
            which may be a pair with a weight of its own. A third parameter called `place` gets a `StepPlace`: epoch,
            step and shard.
            With several optimizers: one function, after whose backward all of them step, or one for each, by name: then
            a step makes one update after the other on the batch, each with the shards' forward and backward.
        num_shards: Number of shards of the run, at least the number of workers; the loader's must be the same.
        seed: Of every random state in a step.
        every: Of several optimizers, in every how many steps one steps, by name: `{"generator": 5}` in steps 5, 10, ...
            of the run, counted from 1. One that is not named steps in every step. What it does not step by is left out.
        scheduler: Learning-rate scheduler; stepped once per step. Step one that counts epochs in the loop instead. Of
            several optimizers a dictionary with their names: each is stepped when its optimizer has stepped.
        scaler: Scales the loss for float16, and leaves steps out whose gradients overflow; on all workers alike.
        max_grad_norm: Clip the gradient's 2-norm to this.
        nonfinite: What to do with a step whose loss or gradient is not finite: "stop" raises an error; "skip" leaves
            parameters, buffers and optimizer as they were, on all workers alike, and continues. On a GPU, with an
            optimizer of torch's that has fused=True and without a scaler, no step waits for its loss: "stop" raises in
            the next `step`, `save`, `evaluate`, `move_to` or `close`, and the cursor is at the failed step again.
        balance: "even": every worker runs the same number of shards, or one more. "speed": shards move from slow
            workers to fast ones while training; no bit of the result depends on who runs which.
        deterministic: What `lockstep.set_deterministic` is called with, which holds for the whole process. True:
            operators that have a deterministic form use it, others raise; cuDNN does not try kernels. False: operators
            need not be deterministic, and cuDNN tries kernels. Either replaces what you have set before.
        bucket_limits: Sizes of the gradient buckets.
        on_worker_loss: What `step`, `evaluate`, `save` and `load` do when a worker of `ls.launch` is killed, for a
            model on the CPU and the default group. "stop": the call raises an error. "continue": the workers that are
            left divide its shards and finish the call, with the bits that it would have had; ranks may be others then.
            What the loop does between two calls keeps its effect. Not for several optimizers that have a loss each.
        min_workers: With fewer workers left the run ends with an error; for `on_worker_loss="continue"`.
        world: The workers; None for the default group, which is made if torchrun or another launcher started
            this worker and it is not there, or alone.

    Attributes:
        engine: Takes the steps, with the present workers.
        optimizer: The optimizer; several as one, with the groups of all, and each in `parts` by its name.

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
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        loss: Loss | Mapping[str, Loss],
        num_shards: int,
        seed: int = 0,
        every: Mapping[str, int] | None = None,
        scheduler: Scheduler | LRScheduler | Mapping[str, Scheduler | LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        max_grad_norm: float | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        balance: Literal["even", "speed"] = "even",
        deterministic: bool = True,
        bucket_limits: BucketLimits | None = None,
        on_worker_loss: Literal["stop", "continue"] = "stop",
        min_workers: int = 1,
        world: World | None = None,
    ) -> None:
        world = join_world() if world is None else world
        self._arguments = TrainerArguments(
            model=model,
            optimizer=optimizer,
            loss=loss,
            every=every,
            num_shards=num_shards,
            seed=seed,
            scheduler=scheduler,
            scaler=scaler if scaler is not None and scaler.is_enabled() else None,
            max_grad_norm=max_grad_norm,
            nonfinite=nonfinite,
            balance=balance,
            deterministic=deterministic,
            bucket_limits=bucket_limits or BucketLimits(),
        )
        descriptions = check_arguments(self._arguments, world)
        self._state = RunState(self._arguments)
        self.model = model
        self.optimizer = self._state.optimizer
        self.scheduler = scheduler
        self.scaler = self._state.scaler
        self.num_shards = self._state.num_shards
        self.seed = self._state.seed
        self._switches = DeterminismSwitches(deterministic=deterministic)
        try:
            self.engine = StepEngine(self._state, self._arguments, world, descriptions)
        except BaseException:
            self._switches.restore()
            raise
        if min_workers < 1:
            raise ValueError(f"min_workers is {min_workers}, expected 1 or more.")
        if on_worker_loss == "continue" and isinstance(loss, Mapping):
            raise ValueError(
                'on_worker_loss="continue" is for one loss function: workers could be apart by one of the updates of a '
                'step. Use on_worker_loss="stop", and resume from a checkpoint.'
            )
        continues = on_worker_loss == "continue" and world == current_world()
        self._recovery = Recovery(self._state, self._continue_with, continues=continues, min_workers=min_workers)
        self._state.may_be_unread = self._recovery.member is None
        self.engine.ask_others = self._recovery.ask_others

    @property
    def world(self) -> World:
        """The present workers."""
        return self.engine.world

    @property
    def can_continue(self) -> bool:
        """Whether this trainer continues without workers that are lost."""
        return not self._state.may_be_unread

    @property
    def cursor(self) -> Cursor:
        """The next step."""
        return self._state.cursor

    @property
    def global_step(self) -> int:
        """How many steps were taken, skipped ones included."""
        return self._state.global_step

    def step(self, batch: ShardedBatch) -> StepResult:
        """Train on one global batch (collective: every worker calls, with its part of the same batch).

        The model stays in the mode in which it is, training mode unless you changed it. The global generators of
        Python, NumPy and torch are seeded anew for each shard, and once more before the update, alike on every worker.

        An error on one worker is an error on all. Parameters, buffers, optimizer, scheduler, scaler, generators and the
        place in the data are as they were before the step then, and it may be taken again. Three cases are different; a
        checkpoint must be loaded on every rank then:

        - The optimizer or the scheduler raises when it has written something.
        - It raises on some workers alone: the others have finished the step. The next step raises on all.
        - The loss function writes a parameter on every worker: none has its value any more.

        Raises:
            LossError: The loss is not a scalar, it or its gradient is not finite or depends on no parameter, or the
                summed weight is not positive; or the model writes its parameters, or begins to use reentrant
                checkpoints after its first step.
            ParameterMismatchError: Parameters have other values than on another worker.
            ReductionError: Another worker has raised an error in this step.
            TypeError: The batch is not one of a ShardedLoader.
            UnusableStateError: An earlier step has failed in one of the ways above, and no checkpoint was loaded since.
            ValueError: The batch was cut into another number of shards, is of another loader or another step than the
                other workers', or is not the next one of a restored run; the model was changed between steps; the
                optimizer's options are not the other workers'; or the trainer was closed.
        """
        return self._recovery.step(partial(self._step, batch), lambda: self.engine)

    def _step(self, batch: ShardedBatch) -> StepResult:
        self.engine.planned = 0
        if isinstance(batch, ShardedBatch):  # the engine refuses anything else, on every worker
            if self._recovery.has_moved and batch.world != self.world:
                batch = batch.for_present_workers()
            # Not at the end of an epoch: a new worker begins at the cursor, and the others may evaluate and save first.
            is_end = batch.cursor.step + 1 == batch.num_steps > 1
            self.engine.planned = 0 if is_end else self._recovery.planned_number
        return self.engine.step(batch)

    def request_stop(self) -> None:
        """Let `StepResult.should_stop` be true on every worker in the steps from now on (local).

        For a signal to end, which reaches the workers at different moments, or only one of them: all leave the loop
        after the same step.

            signal.signal(signal.SIGTERM, lambda number, frame: trainer.request_stop())
            ...
            if trainer.step(batch).should_stop:
                trainer.save("run.ckpt")
                return  # under ls.launch; in a script of lockstep run or torchrun: sys.exit(75)
        """
        self.engine.stop_requested = True

    def evaluate(self, loader: ShardedLoader, metric: Metric | Any) -> Any:
        """Sum `metric` over a data set, each sample counted once (collective).

        Sums are kept per shard and added in shard order, so the result has the same bits on any number of workers.
        The model is in evaluation mode meanwhile. Every slice starts from the buffers that the model has now, and what
        a forward writes to them is put back.

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
        self._state.check_last_step()
        return self._recovery.repeatable(lambda: evaluate(self._state, self.world, loader, metric), self._world)

    def repeatable(self, call: Callable[[World], Result]) -> Result:
        """Make collective calls of your own, which continue without a lost worker as `evaluate` does (collective).

            should_stop = trainer.repeatable(lambda world: any(world.gather_objects(stop_file.exists())))

        Args:
            call: Called with the present workers; and again, with others, if one is lost meanwhile. It changes nothing
                that lasts, or nothing that a second call does not do alike.
        """
        return self._recovery.repeatable(lambda: call(self.world), self._world)

    def on_continued(self, listener: Callable[[Continued, World], None]) -> None:
        """Call `listener` on every worker that continues without others, instead of logging who was lost (local).

        It is called with what has happened and the present workers, in the call that continues. It may make no
        collective calls.
        """
        self._recovery.on_continued = listener

    def verify(self, loader: ShardedLoader, steps: int = 2) -> None:
        """Check that no bit of the result depends on who runs which shard (collective); the trainer is as before then.

        Every worker computes each shard of the next steps in two orders. That takes as long as training on the steps
        `2 * world_size` times. State in attributes of modules, in closures and in the data set is not put back.

        Args:
            loader: The data.
            steps: How many steps, from the cursor on; fewer where the epoch ends.

        Raises:
            LossError: A loss or a gradient has other bits when other shards are run before it, or on another worker,
                or samples are others when they are loaded again; names what differs.
        """
        self._state.check_last_step()
        verify(self._state, self.engine, loader, steps, self.engine.step)

    def on_new_world(self, callback: Callable[[World], object]) -> None:
        """Call `callback(world)` now, and again whenever the workers are others (collective).

        For groups of your own: those of workers of which one is lost cannot be used any more.

            def make_groups(world):
                groups["data"] = dist.new_group(range(world.world_size))

            trainer.on_new_world(make_groups)

        The callback may make collective calls.
        """
        self._recovery.on_new_world(callback, self._world)

    def join(self) -> bool:
        """Join the others, if this worker was started when they were training already (collective for new workers).

        Call it when model, optimizer, loader and trainer are made, in the place where you would load a checkpoint. It
        waits for the end of a step of the others, and takes the state of the run from the memory of one of them: model,
        optimizer, scheduler, scaler, place in the data, generators. Then begin at the trainer's cursor. On any other
        worker it does nothing.

        Returns:
            Whether this worker is new.

        Raises:
            CheckpointError: This worker has another model or optimizer than the others.
            SystemExit: It is not needed: the run has ended.
        """
        return self._recovery.join()

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, 64 hex digits; the same on every worker (local)."""
        return self._state.digest()

    def fingerprint(self) -> Fingerprint:
        """Return what the digest depends on besides code and data, as this process is set now (local)."""
        return self._state.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to resume, on any number of workers (local).

        `save` writes it into a file. To resume, load it into a trainer that was made in the same way, and begin at its
        cursor, as with `load`.

        Raises:
            UnusableStateError: An update has failed in the middle, and no checkpoint was loaded since.
        """
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned (local: every worker calls, with the same state).

        Warns of settings that the bits depend on and that were different when the state was saved.

        Raises:
            CheckpointError: The state belongs to another model or optimizer, another number of shards or another seed,
                or to a run with a scheduler or scaler where this has none, or the other way round. Nothing was changed.
        """
        with self._state.restored_from(state):
            pass
        if self.world.rank == 0:  # one warning is enough
            warn_of_other_conditions(state.get("fingerprint"), self.fingerprint())

    def save(
        self,
        path: str | Path,
        *,
        scheduler: Scheduler | LRScheduler | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> Path:
        """Write all that the run needs to resume into one file, and return its path (collective: every worker calls).

        Rank 0 writes; when this returns the file is complete and on the disk. It has the format that `lockstep train`
        writes, docs/checkpoint-format.md.

        Args:
            path: The file; an existing directory for one in it that is named by the step, `step-00000240.ckpt`.
            scheduler: One that you step yourself, if it is to be saved as well.
            metrics: What was measured, by name; `load` returns it.

        Raises:
            CheckpointError: On all workers: the file cannot be written. What was under `path` before is still there.
            PeerFailedError: The state of another worker cannot be used.
            UnusableStateError: An update has failed in the middle, and no checkpoint was loaded since.
            ValueError: The trainer steps a scheduler by itself already.
        """
        self._state.check_last_step()
        return self._recovery.repeatable(
            lambda: save_state(self._state, self.world, Path(path), scheduler, metrics), self._world
        )

    def load(self, path: str | Path, *, scheduler: Scheduler | LRScheduler | None = None) -> LoadedState:
        """Resume from a file of `save` or `lockstep train`, on any number of workers (collective: every worker calls).

        Each worker reads the file, every byte is checked, and all compare what they have read. Then begin at the
        cursor, in the middle of an epoch too; a new trainer may begin so as well:

            for epoch in range(trainer.cursor.epoch, num_epochs):
                for batch in loader.epoch(epoch, trainer.cursor.step):
                    trainer.step(batch)

        The optimizer continues with the options of the file, its learning rate among them; where it was made with
        others, `load` warns. To change one, set it in `optimizer.param_groups` after this.

        Args:
            path: The file; a directory for the newest complete checkpoint in it, with a warning for each broken one.
            scheduler: The one that `save` was given.

        Raises:
            CheckpointError: On all workers: the file is missing or damaged, is not the same on all of them, or belongs
                to another model, optimizer or run. Nothing was changed.
            ValueError: The trainer steps a scheduler by itself already.
        """
        return self._recovery.repeatable(
            lambda: load_state(self._state, self.world, Path(path), scheduler), self._world
        )

    def move_to(self, world: World) -> None:
        """Continue with other workers (collective for these): close the present engine and make a new one.

        The state of the run stays: model, optimizer, scheduler, scaler and cursor, which must be the same on all of the
        new workers. A loader that is to continue as well is made with `world=lambda: trainer.world`.

        Args:
            world: The new workers.

        Raises:
            ParameterMismatchError: Workers have different models.
            PeerFailedError: This number of workers is refused on another worker.
            ValueError: More workers than shards, or trainers that differ between workers.
        """
        self._state.check_last_step()
        self.engine.close()
        progress = {"place in the data": str(self.cursor), "steps taken": str(self.global_step)}
        self._replace_engine(world, check_arguments(self._arguments, world, progress))
        self._recovery.leave_run(is_in_run=world == current_world())

    def _world(self) -> World:
        return self.world

    def _continue_with(self, world: World) -> None:
        """Continue with other workers, which are where this one is (local)."""
        if self.engine.phase is StepPhase.CLOSED:
            self.engine.world = world  # for what still works
        else:
            self._replace_engine(world, None)

    def _replace_engine(self, world: World, descriptions: Sequence[Description] | None) -> None:
        before = self.engine
        before.close()
        self.engine = StepEngine(self._state, self._arguments, world, descriptions)
        self.engine.stop_requested, self.engine.agreement = before.stop_requested, before.agreement
        self.engine.ask_others = self._recovery.ask_others

    def close(self) -> None:
        """Release hooks, threads and buckets, and restore torch's deterministic switches (local).

        Gradients are released too. What reads the state still works: `digest`, `state_dict`, `save`, `evaluate`.

        Raises:
            LossError: The last step was not finite, and no call has raised that yet; see `nonfinite`.
        """
        self.engine.close()
        self._switches.restore()
        self._state.check_last_step()
