"""`Trainer`: what a training loop calls.

A face over three objects, and the reference of what they offer: `RunState` is the state of the run; `PresentEngine` has
a `StepEngine`, which takes the steps, and makes another one when the workers are others; its `Moments` call the
callbacks. `Trainer.internals`, which is that, is what `lockstep.runs` uses beside the public names.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Unpack, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from lockstep.comm import World, join_world
from lockstep.data import Cursor, ShardedBatch, ShardedLoader
from lockstep.data.loader import LoaderOptions
from lockstep.engine.arguments import TrainerArguments, check_arguments, find_device_type, warn_of_other_conditions
from lockstep.engine.averaging import SWA, AveragedWeights, tensors_of
from lockstep.engine.callbacks import Callback
from lockstep.engine.evaluation import Forward, Metric, compute_statistics, evaluate
from lockstep.engine.fingerprint import DeterminismSwitches, Fingerprint
from lockstep.engine.first_steps import verify
from lockstep.engine.networks import TRAINED_MODELS
from lockstep.engine.present import PresentEngine
from lockstep.engine.run_state import RunState
from lockstep.engine.saving import LoadedState, load_state, save_state
from lockstep.engine.shard_runs import Loss
from lockstep.engine.state_parts import Scheduler, Stateful
from lockstep.engine.step_table import StepResult
from lockstep.processes.loaded_states import warn_of_missed_states
from lockstep.reduce import BucketLimits
from lockstep.torch_private.compiler import compile_module

Result = TypeVar("Result")


@final
class Trainer:
    """Train a model on sharded batches, with every worker of a group or alone.

        model = Net().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = ls.Trainer(model, optimizer, loss=loss_fn, num_shards=8, seed=0)
        loader = trainer.loader(dataset, batch_size=256)    # over all workers
        for batch in loader.epoch(0):
            result = trainer.step(batch)
        print(trainer.digest())    # the same on any number of workers

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
            slice's mean loss, or a pair of a mean and its weight, say over tokens; for mixed
            precision see `precision`. A weight that is a tensor on a GPU is not read: where a
            slice may have weight 0, its gradient must be finite, as with `/ count.clamp(min=1)`.
            It may return `{"loss": ..., "kl": ...}` instead: `StepResult.values` has the mean of each further number,
            which may be a pair with a weight of its own. A third parameter called `place` gets a `StepPlace`: epoch,
            step and shard.
            With several optimizers: one function, after whose backward all of them step, or one for each, by name: then
            a step makes one update after the other on the batch, each with the shards' forward and backward.
        num_shards: Number of shards of the run, at least the number of workers; a loader's must be the same.
        seed: Of every random state in a step, and of the order of the data in `loader`.
        every: Of several optimizers, in every how many steps one steps, by name: `{"generator": 5}` in steps 5, 10, ...
            of the run, counted from 1. One that is not named steps in every step. What it does not step by is left out.
        scheduler: Learning-rate scheduler; stepped once per step. Step one that counts epochs in the loop instead. Of
            several optimizers a dictionary with their names: each is stepped when its optimizer has stepped.
        scaler: Scales the loss for float16, and leaves steps out whose gradients overflow; on all workers alike.
        precision: The dtype of autocast, for loss functions and in `evaluate` for metrics; parameters keep theirs.
            "float16" makes a scaler, if none is given.
        max_grad_norm: Clip the gradient's 2-norm to this.
        track_grad_norm: Let `StepResult` have the norm where it is not clipped, too.
        compile: Compile the model, in its place: each call runs a graph that torch.compile makes for its shapes.
            "aot_eager" and the like name another backend of torch.compile. Other bits than without, and the same on
            any number of workers.
        nonfinite: What to do with a step whose loss or gradient is not finite: "stop" raises an error; "skip" leaves
            parameters, buffers and optimizer as they were, on all workers alike, and continues. On a GPU, with an
            optimizer of torch's that has fused=True and without a scaler, no step waits for its loss: "stop" raises in
            the next `step`, `save`, `evaluate` or `close`, and the cursor is at the failed step again.
        exact_mean: Whether the loss of a slice must be a mean over its samples, or over what its weight counts, so that
            a step has the gradient of its whole batch. It is tried in the first step, on the slice of shard 0 and its
            parts, in evaluation mode: another loss raises an error. False: whatever it is, a step has the mean of its
            shards' losses, and another gradient with another `num_shards`.
        shard_optimizer: Cut the optimizer's state into as many parts as there are workers, each of which holds one,
            updates its part of the parameters, and gets the others from the others. The bits are those of the whole
            optimizer; torch's optimizers, and others of which a trial shows that, can be shared. If an update fails on
            a worker, a checkpoint must be loaded.
        neighbours: How many further workers hold each part, so that it is not lost with a worker; for
            `on_worker_loss="continue"`. With 0, a lost worker ends the run.
        verify_steps: In how many steps after the first one, of a resumed run too, a shard of each worker is computed
            once more, by another worker and after another shard, from samples that are loaded again, and as if this
            were another process, or later. What differs is warned of. A slice of the first evaluations is, too.
            Not with `deterministic=False`; 0 for none.
        balance: "even": every worker runs the same number of shards, or one more. "speed": shards move from slow
            workers to fast ones while training; no bit of the result depends on who runs which.
        deterministic: What `lockstep.set_deterministic` is called with, which holds for the whole process. True:
            operators that have a deterministic form use it, others raise; cuDNN does not try kernels. False: operators
            need not be deterministic, and cuDNN tries kernels. Either replaces what you have set before.
        bucket_limits: Sizes of the gradient buckets.
        on_worker_loss: What `step`, `evaluate`, `save` and `load` do when a worker of `ls.launch` is killed, for the
            default group. "stop": the call raises an error. "continue": the workers that are left divide its shards and
            finish the call, with the bits that it would have had; ranks may be others then. What the loop does between
            two calls keeps its effect. On an accelerator each step waits for the device. Not for several optimizers
            that have a loss each.
        min_workers: With fewer workers left the run ends with an error; for `on_worker_loss="continue"`.
        callbacks: Called at named moments; their state is saved with the run. See `Callback`.
        world: The workers; None for the default group, which is made if torchrun or another launcher started
            this worker and it is not there, or alone.

    Attributes:
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
        precision: Literal["float32", "bfloat16", "float16"] = "float32",
        max_grad_norm: float | None = None,
        track_grad_norm: bool = False,
        compile: bool | str = False,  # noqa: A002 - torch's word
        nonfinite: Literal["stop", "skip"] = "stop",
        exact_mean: bool = True,
        verify_steps: int = 3,
        shard_optimizer: bool = False,
        neighbours: int = 1,
        balance: Literal["even", "speed"] = "even",
        deterministic: bool = True,
        bucket_limits: BucketLimits | None = None,
        on_worker_loss: Literal["stop", "continue"] = "stop",
        min_workers: int = 1,
        world: World | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._world_given = world
        world = join_world() if world is None else world
        warn_of_missed_states(model)
        if precision == "float16" and scaler is None:
            scaler = GradScaler(find_device_type(model))
        arguments = TrainerArguments(
            model=model,
            optimizer=optimizer,
            loss=loss,
            every=every,
            num_shards=num_shards,
            seed=seed,
            scheduler=scheduler,
            scaler=scaler if scaler is not None and scaler.is_enabled() else None,
            precision=precision,
            max_grad_norm=max_grad_norm,
            track_grad_norm=track_grad_norm,
            compile=compile,
            nonfinite=nonfinite,
            exact_mean=exact_mean,
            verify_steps=verify_steps,
            shard_optimizer=shard_optimizer,
            neighbours=neighbours,
            balance=balance,
            deterministic=deterministic,
            bucket_limits=bucket_limits or BucketLimits(),
            on_worker_loss=on_worker_loss,
            min_workers=min_workers,
            callbacks=callbacks,
        )
        descriptions = check_arguments(arguments, world)
        if compile:
            compile_module(model, "inductor" if compile is True else compile)
        self._state = RunState(arguments)
        self.model = model
        self.optimizer = self._state.optimizer
        self.scheduler = scheduler
        self.scaler = self._state.scaler
        self.num_shards = self._state.num_shards
        self.seed = self._state.seed
        self._switches = DeterminismSwitches(deterministic=deterministic)
        try:
            self.internals = PresentEngine(self, self._state, arguments, world, descriptions)
        except BaseException:
            self._switches.restore()
            raise

    def loader(self, dataset: Dataset[Any], *, batch_size: int, **options: Unpack[LoaderOptions]) -> ShardedLoader:
        """Return a `ShardedLoader` with the shards, the seed and the workers of this trainer (local).

            loader = trainer.loader(train, batch_size=384)    # samples of a step over all workers
            test_loader = trainer.loader(test, batch_size=384, shuffle=False)

        It takes the other arguments of `ShardedLoader` too, which says what it raises.
        """
        mine: dict[str, Any] = {"num_shards": self.num_shards, "seed": self.seed, "world": self._world_given}
        return ShardedLoader(dataset, batch_size=batch_size, **mine, **options)

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
        self.internals.moments.start()
        result = self.internals.step(batch)
        self.internals.moments.end_step(result)
        return result

    def evaluate(
        self, loader: ShardedLoader, metric: Metric | Any, *, weights: AveragedWeights | None = None, name: str = ""
    ) -> Any:
        """Sum `metric` over a data set, each sample counted once (collective).

        Sums are kept per shard and added in shard order, so the result has the same bits on any number of workers.
        The model is in evaluation mode meanwhile. Every slice starts from the buffers that the model, and the networks
        that the loss or the metric uses, have now, and what a forward writes to them is put back.

        Args:
            loader: The data; its batches are pairs (input, target) if the metric is of torchmetrics.
            metric: `metric(model, batch)`, which returns a sum over a slice and its weight, or several by name; or a
                Metric or MetricCollection of torchmetrics, which sees all predictions in the order of the data.
            weights: An average of the weights, to evaluate in their place.
            name: Of the data set; callbacks get `name_loss` in place of `loss` then.

        Returns:
            The means by name, each a `Mean`; a metric that returns a bare pair is called `"metric"`. With torchmetrics
            what its `compute` returns, on the CPU.

        Raises:
            PeerFailedError: The metric has raised an error on another worker.
            TypeError: Not a ShardedLoader, or no average, or the metric returned neither a sum and a weight nor several
                by name.
            ValueError: Workers evaluate on different data, or a weight is below zero or not a number; or the average
                has averaged nothing, and is not among the callbacks.
        """
        self._state.check_last_step()
        tensors = tensors_of(weights, self._state.callbacks.all())
        found = self.internals.repeatable(lambda world: evaluate(self._state, world, loader, metric, tensors))
        self.internals.moments.look_at_evaluation(found, name)
        return found

    def update_batchnorm(self, loader: ShardedLoader, weights: SWA, forward: Forward | None = None) -> None:
        """Compute the statistics of BatchNorm anew for averaged weights, in one pass over the data (collective).

        The model is in training mode meanwhile, and is not changed.

        Args:
            loader: The training data.
            weights: The average; gets the statistics.
            forward: `forward(model, batch)`; by default the model is called with the first part of each batch.

        Raises:
            PeerFailedError: The forward has raised an error on another worker.
            ValueError: Workers have different data.
        """
        self._state.check_last_step()
        forward = forward or (lambda model, batch: model(batch[0]))
        found = self.internals.repeatable(
            lambda world: compute_statistics(self._state, world, loader, weights.tensors, forward)
        )
        weights.set_statistics(found)

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
        engine = self.internals.engine
        verify(engine.runs, loader, steps, engine.looked_at, engine.step)

    # -- Reading, saving and loading the state of the run --------------------------------------------------------------

    @property
    def cursor(self) -> Cursor:
        """The next step."""
        return self._state.cursor

    @property
    def global_step(self) -> int:
        """How many steps were taken, skipped ones included."""
        return self._state.global_step

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers, 64 hex digits; the same on every worker (local).

        Those of networks that the loss uses beside the model, such as a teacher, are among them.
        """
        return self._state.digest()

    def fingerprint(self) -> Fingerprint:
        """Return what the digest depends on besides code and data, as this process is set now (local)."""
        return self._state.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to resume, on any number of workers (local), and networks that the loss uses.

        With `shard_optimizer` it is collective, and each worker has the whole state then: `save` takes less memory.

        `save` writes it into a file. To resume, load it into a trainer that was made in the same way, and begin at its
        cursor, as with `load`.

        Raises:
            UnusableStateError: An update has failed in the middle, and no checkpoint was loaded since.
        """

        def read(world: World) -> dict[str, Any]:
            with self._state.sharing.collected(world, range(world.world_size)):
                return self._state.to_dict()

        return self.internals.repeatable(read) if self._state.sharing else read(self.world)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned (local: every worker calls, with the same state).

        Warns of settings that the bits depend on and that were different when the state was saved.

        Raises:
            CheckpointError: The state belongs to another model or optimizer, another number of shards or another seed,
                or to a run with a scheduler or scaler where this has none, or the other way round. Nothing was changed.
        """
        with self._state.restored_from(state):
            pass
        self.internals.moments.begin_again()
        if self.internals.world.rank == 0:  # one warning is enough
            warn_of_other_conditions(state.get("fingerprint"), self.fingerprint())

    def save(
        self,
        path: str | Path,
        *,
        scheduler: Scheduler | LRScheduler | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
        extra: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> Path:
        """Write all that the run needs to resume into one file, and return its path (collective: every worker calls).

        Rank 0 writes; when this returns the file is complete and on the disk. It has the format that `lockstep train`
        writes, docs/checkpoint-format.md. Networks that the loss uses beside the model are in it.

        Args:
            path: The file; an existing directory for one in it that is named by the step, `step-00000240.ckpt`.
            scheduler: One that you step yourself, if it is to be saved as well.
            metrics: What was measured, by name; `load` returns it.
            extra: Further objects whose state is saved, by name: anything with `state_dict` and `load_state_dict`,
                whose states are numbers, text, tensors, and lists and dictionaries of these, as other trainers. Rank
                0's are saved.

        Raises:
            CheckpointError: On all workers: the file cannot be written. What was under `path` before is still there.
            PeerFailedError: The state of another worker cannot be used.
            UnusableStateError: An update has failed in the middle, and no checkpoint was loaded since.
            ValueError: The trainer steps a scheduler by itself already.
        """
        self._state.check_last_step()
        file = self.internals.repeatable(
            lambda world: save_state(self._state, world, Path(path), scheduler, metrics, extra)
        )
        self.internals.moments.note_save(file)
        return file

    def load(
        self,
        path: str | Path,
        *,
        scheduler: Scheduler | LRScheduler | None = None,
        extra: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> LoadedState:
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
            extra: What `save` was given; each object takes its state back.

        Raises:
            CheckpointError: On all workers: the file is missing or damaged, is not the same on all of them, or belongs
                to another model, optimizer or run. Nothing was changed.
            ValueError: The trainer steps a scheduler by itself already.
        """
        loaded = self.internals.repeatable(lambda world: load_state(self._state, world, Path(path), scheduler, extra))
        self.internals.moments.begin_again()
        return loaded

    # -- Other workers: some are lost, others join ---------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The present workers."""
        return self.internals.world

    def repeatable(self, call: Callable[[World], Result]) -> Result:
        """Make collective calls of your own, which continue without a lost worker as `evaluate` does (collective).

            should_stop = trainer.repeatable(lambda world: any(world.gather_objects(stop_file.exists())))

        Args:
            call: Called with the present workers; and again, with others, if one is lost meanwhile. It changes nothing
                that lasts, or nothing that a second call does not do alike.
        """
        return self.internals.repeatable(call)

    def on_new_world(self, callback: Callable[[World], object]) -> None:
        """Call `callback(world)` now, and again whenever the workers are others (collective).

        For groups of your own: those of workers of which one is lost cannot be used any more.

            def make_groups(world):
                groups["data"] = dist.new_group(range(world.world_size))

            trainer.on_new_world(make_groups)

        The callback may make collective calls.
        """
        self.internals.on_new_world(callback)

    def join(self, loop: Stateful | None = None, *, before_leaving: Callable[[], object] | None = None) -> bool:
        """Join the others, if this worker was started when they were training already (collective for new workers).

        Call it when model, optimizer, loader and trainer are made, and of several trainers all, in the place where you
        would load a checkpoint. It waits until the others begin a step, and takes the state of the run from the memory
        of one of them: model, optimizer, scheduler, scaler, place in the data, generators. Then begin at the trainer's
        cursor: that is the step. What the others do after the step before, as an evaluation or a save, is done then. On
        any other worker it only notes the arguments.

        Args:
            loop: What your loop keeps beside the trainer and a new worker needs, such as the best value so far: its
                `state_dict()` is called on one of the others, and `load_state_dict` on the new worker: numbers, text,
                tensors, and lists and dictionaries of these.
            before_leaving: Called on a worker that was asked to leave, before the others go on without it: finish what
                only this worker does, such as a file that it writes.

        Returns:
            Whether this worker is new.

        Raises:
            CheckpointError: This worker has another model or optimizer than the others, or other trainers.
            SystemExit: It is not needed: the run has ended.
        """
        is_new = self.internals.join(loop, before_leaving)
        if is_new:
            self.internals.moments.start_as_others()
        return is_new

    # -- Ending before the last epoch, on all workers after the same step ----------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether a callback has ended the training; the same on all workers. Leave the loop then, and evaluate."""
        return self._state.is_ending

    @property
    def end_reason(self) -> str:
        """Why, on the workers whose callback has; on all after the next evaluation or save. Else empty."""
        return self._state.end_reason

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
        self.internals.engine.requests.stop_requested = True

    def request_end(self, reason: str, *, after_next_step: bool = False) -> None:
        """End the training, on every worker (local; for callbacks).

        `is_ending` is true then on all workers: after the next step, or when the moment is over in which a callback has
        called this, but for `on_step`. It is so too if one worker alone has called it, by its clock for instance.

        Args:
            reason: Why, for the user: "patience is exhausted".
            after_next_step: Whether one more step is to be taken in any case.
        """
        if after_next_step:
            self._state.end_reason_after_step = reason
        else:
            self._state.end_reason = self._state.end_reason or reason

    def close(self) -> None:
        """Release hooks, threads and buckets, and restore torch's deterministic switches (local).

        Gradients are released too. What reads the state still works: `digest`, `state_dict`, `save`, `evaluate`.

        Raises:
            LossError: The last step was not finite, and no call has raised that yet; see `nonfinite`.
        """
        try:
            self.internals.moments.end()
        finally:
            self.internals.engine.close()
            TRAINED_MODELS.discard(self._state)
            self._switches.restore()
        self._state.check_last_step()
