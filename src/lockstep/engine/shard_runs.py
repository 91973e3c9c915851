"""Forward and backward of the shards of one worker, and what that takes: what the parts of a step share."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.data import ShardedBatch, Slice
from lockstep.data.batch import ErrorPlace
from lockstep.data.keyed import OwnGenerators, generators_of_training
from lockstep.devices.transfer import InputCopies, is_asynchronous, to_device
from lockstep.engine.arguments import TrainerArguments
from lockstep.engine.balance import Stopwatch
from lockstep.engine.buffers import ShardZeroBuffers
from lockstep.engine.losses import (
    DeviceRow,
    ShardLosses,
    SliceLoss,
    StepValues,
    begin_backward_at,
    gradient_of_loss,
    read_loss,
    split_loss,
    zero_over_parameters,
)
from lockstep.engine.networks import changes_with_mode, evaluation_mode, find_networks, networks_walk
from lockstep.engine.optimizers import UpdateSpec
from lockstep.engine.parameters import ParameterHooks
from lockstep.engine.run_state import RunState
from lockstep.engine.shard_notices import (
    SampleData,
    buffers_of_users,
    find_no_mean,
    no_mean,
    problem_of_mean,
    uses_batch_statistics,
    warn_of_compared_samples,
    warn_of_pair,
    warn_of_row_writes,
)
from lockstep.engine.side_effects import LeftState, StateWatch
from lockstep.engine.step_table import CurrentStep, StepPart
from lockstep.engine.user_function import EXPLAINED_ERRORS, StepPlace, UserFunction
from lockstep.errors import LossError
from lockstep.means import Mean, in_shard
from lockstep.processes.loaded_states import warn_of_missed_states
from lockstep.processes.reproducibility import keep_generator_states, reseed_generators
from lockstep.recording import NO_EVENT, EventKind, own_recorder
from lockstep.reduce import ShardReducer, TrainedModel
from lockstep.reduce.tensor_bits import sum_of_bits
from lockstep.shards import ShardTask, derive_seed
from lockstep.torch_private.autograd import run_backward
from lockstep.torch_private.compiler import without_compiler
from lockstep.torch_private.modules import tree_leaves, version_of

Loss = Callable[..., Tensor | tuple[Tensor, float | Tensor] | Mapping[str, Any]]
"""`loss(model, batch)` or `loss(model, batch, place)`: the mean loss of a slice (scalar), the pair of it and its weight
(say, tokens), or a dictionary with one of these as "loss" and further means by name. `place` is a `StepPlace`."""


@final
class RandomStates(StepPart):
    """Seeds all random generators, and puts them back if a step fails; `own` are those of the model and the loss."""

    def __init__(self, own: OwnGenerators) -> None:
        self.own = own
        self._restore_calls: list[Callable[[], object]] = []

    def begin(self, _step: CurrentStep) -> None:
        self.save()

    def commit(self, _step: CurrentStep) -> None:
        self._restore_calls = []

    def undo(self, _step: CurrentStep) -> None:
        self.restore()

    def save(self) -> None:
        self.own.save()
        self._restore_calls = [*keep_generator_states(), self.own.restore]

    def restore(self) -> None:
        for restore in self._restore_calls:
            restore()
        self._restore_calls = []

    def seed(self, seed: int) -> None:
        reseed_generators(seed)
        self.own.seed_as_global()


@final
class ShardRuns:
    """`row` is None where the host waits for the device or the model is on the CPU; `stopwatch` where shards stay."""

    def __init__(self, state: RunState, arguments: TrainerArguments, trained: TrainedModel, world: World) -> None:
        # Annotated where `STEP_PARTS` reads it: type checkers come there first, by way of `callback_types.pyi`.
        self.state: RunState = state
        self.arguments = arguments
        self.trained = trained
        self.world: World = world
        losses, is_on_device = state.plan.losses, is_asynchronous(state.device)
        has_row = is_on_device and not state.waits_for_device
        self.row = DeviceRow(world, state.num_shards, state.device) if has_row else None
        self.buffers: ShardZeroBuffers = ShardZeroBuffers(state.kept_modules(), world, state.device)
        self.gradients = ShardReducer(trained, world, state.num_shards, arguments.bucket_limits)
        self.gradients.send_besides(self.buffers.start_sending)
        self.random: RandomStates = RandomStates(
            generators_of_training(state.model, losses[0] if len(losses) == 1 else losses)
        )
        self.losses: ShardLosses = ShardLosses(self.row)
        self.values: StepValues = StepValues(state.num_shards, self.row)
        self.hooks: ParameterHooks = ParameterHooks(trained.trained, world)
        self.stopwatch: Stopwatch | None = None
        self._recorder = own_recorder()
        if arguments.balance == "speed" and world.world_size > 1:
            gradients = weakref.proxy(self.gradients)  # it holds the stopwatch
            device = state.device if is_on_device else None
            self.stopwatch = Stopwatch(self._recorder, lambda: gradients.last_gradient_ns, device)
            self.gradients.on_last_gradient(self.stopwatch.last_gradient)
        self._functions: dict[str, UserFunction] = {}
        self._watch = StateWatch(state.model, _no_loss)
        self._loss, self._purpose = UserFunction(_no_loss, self.random.own), "shard"
        self._may_be_no_mean = False
        self._copies = InputCopies(state.device)

    def choose(self, update: UpdateSpec) -> None:
        """Let the loss function of an update be called from here on (local)."""
        if update.name not in self._functions:
            self._functions[update.name] = UserFunction(update.loss, self.random.own)
        if update.name not in self.state.watches:
            self.state.watches[update.name] = StateWatch(self.state.model, update.loss)
        self._loss, self._watch = self._functions[update.name], self.state.watches[update.name]
        self._purpose = f"shard {update.name}" if update.name else "shard"

    def run(self, step: CurrentStep) -> None:
        """Run this worker's shards; the last one's gradients are left to `end_last` (its backward is collective)."""
        self.choose(step.update)
        batch, tasks, stopwatch = step.batch, step.tasks, self.stopwatch
        if stopwatch is not None:
            stopwatch.start()
        slices = {part.shard: part for part in batch.slices}
        inputs = self._copy_inputs([slices[task.shard] for task in tasks if task.shard in slices])
        is_watched = self._watch.begin()
        for number, task in enumerate(tasks, start=1):
            event, part = NO_EVENT, slices.get(task.shard)
            if part is not None:
                data = next(inputs)
                event = self._recorder.begin(EventKind.SHARD, part.shard, part.num_samples, 0)
                if stopwatch is not None:
                    stopwatch.begin_shard(event)
                versions = _versions_of(part.data) if is_watched else ()
                looks = part.shard == 0 and self._watch.is_first and batch.num_shards > 1
                written = {name: each.clone() for name, each in self._buffers_of_users().items()} if looks else {}
                with ErrorPlace(batch.cursor, part.shard, part.indices):
                    loss = self._run_shard(batch, part, task, data, looks=looks)
                if written:
                    warn_of_row_writes(written, self._buffers_of_users(), part.num_samples, batch.num_shards)
                if is_watched:
                    self._watch.end_shard()
            is_last = number == len(tasks)
            if not is_last:  # the end of the last one waits for others
                self.gradients.end(task)
                self.buffers.end_shard(task.shard, is_last=False)
                if stopwatch is not None:
                    stopwatch.end_shard(number)
            if is_watched and part is not None:
                is_watched = False
                can_repeat = versions == _versions_of(part.data)
                self._judge_first(batch, part, loss, can_repeat=can_repeat, is_last=is_last)
            self._recorder.end(event)

    def _judge_first(self, batch: ShardedBatch, part: Slice, loss: Tensor, *, can_repeat: bool, is_last: bool) -> None:
        """Look at what the first shard has shown, whose input is as it was if it can be run again (local)."""
        # On the worker of shard 0 alone: a loss that calls collectives would wait for the others, so calls are refused.
        # What is certain is looked for on all, for a forward may do otherwise on some data, or some rank.
        can_repeat = can_repeat and part.shard == 0 and self.state.num_shards > 1
        other = next((each for each in batch.slices if each.shard != part.shard), part)
        # The gradients of the last shard wait in `.grad` still.
        compute = partial(self.compute_again, batch, has_gradients=self._watch.is_first and not is_last)
        with OPEN_GROUPS.refused():
            self._watch.judge(loss, partial(compute, part), partial(compute, other), can_repeat=can_repeat)
            if self._may_be_no_mean and can_repeat:
                self._check_mean(batch, part)
        self._may_be_no_mean = False

    def end_last(self, step: CurrentStep) -> None:
        """Take the gradients of the last shard, and wait for those of all workers (collective)."""
        self.gradients.end(step.tasks[-1])
        self.buffers.end_shard(step.tasks[-1].shard, is_last=True)

    def _copy_inputs(self, parts: Sequence[Slice]) -> Iterator[Any]:
        """Yield each slice's data on the device, while the next slice's are copied there."""
        started = (self._copies.start(part.data) for part in parts)
        upcoming = next(started, None)
        while upcoming is not None:
            present, upcoming = upcoming, next(started, None)
            yield self._copies.finish(present)

    def _buffers_of_users(self) -> dict[str, Tensor]:
        model = self.state.model
        return buffers_of_users({"": model, **find_networks(networks_walk([self._loss.function]), model)})

    def _run_shard(self, batch: ShardedBatch, part: Slice, task: ShardTask, data: Any, *, looks: bool) -> Tensor:
        result = self.call_loss(batch, part, data)
        loss, weight, values = read_loss(result, part)
        if looks:
            warn_of_pair(result)
            function, model = self._loss.function, self.state.model
            warn_of_missed_states(model)
            compares = warn_of_compared_samples(model, function, loss, part.num_samples, batch.num_shards)
            self._may_be_no_mean = self.arguments.exact_mean and not compares
        self.values.add(part.shard, values)
        if isinstance(weight, Tensor) or weight > 0:
            self.losses.add(part.shard, loss, weight)
            root = begin_backward_at(loss)
        elif (zero := zero_over_parameters(loss)) is not None:
            root, weight = zero, batch.num_samples
        else:
            return loss.detach()
        if self.state.scaler is not None:
            root = self.state.scaler.scale(root)
        self.gradients.mark(root, task)
        with EXPLAINED_ERRORS:
            gradient = gradient_of_loss(root, weight, batch.num_samples)
            if type(root) is Tensor:
                run_backward(root, gradient)
            else:  # a subclass may have a backward of its own
                root.backward(gradient)
        self.gradients.end_backward()
        return loss.detach()

    def compute_again(self, batch: ShardedBatch, part: Slice, *, has_gradients: bool) -> list[Tensor]:
        """Compute the loss of a slice from the buffers of the step's begin, and numbers for its gradients (local).

        They are as many as there are trained parameters, or none where a gradient cannot be taken again.
        """
        with self.buffers.of_step_begin():
            # Containers anew: the loss function may have taken items out of its own.
            data = to_device(part.data, self.state.device)
            loss, _, _ = read_loss(self.call_loss(batch, part, data), part)
            if not has_gradients or not loss.requires_grad:
                return [loss.detach()]
            trained = [each for each in self.state.model.parameters() if each.requires_grad]
            try:
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            except RuntimeError:  # a reentrant checkpoint allows no such call; the loss says enough of most state
                return [loss.detach()]
            return [loss.detach(), *(sum_of_bits([] if each is None else [each]) for each in gradients)]

    def _check_mean(self, batch: ShardedBatch, part: Slice) -> None:
        """Refuse a loss that is not a mean over samples, by that of a slice and those of its parts (local).

        In evaluation mode, as dropout would drop other numbers of a part. Not compared is a loss that is another one
        from another seed, that depends on what a forward keeps, as statistics of a batch, or that has no such mode.
        """
        model, purpose, num_samples = self.state.model, self._purpose, part.num_samples
        left, kept = LeftState(model, [self._loss.function]), self.state.kept_modules()
        if left.has_iterators or any(changes_with_mode(each) or uses_batch_statistics(each) for each in kept.modules()):
            return
        dtypes = {self.state.precision or self.trained.trained[0].parameter.dtype}
        dtypes |= {each.dtype for each in model.parameters()}
        is_other = has_total = False
        problem = ""

        def compute(data: Any, num_samples: int) -> SliceLoss:
            nonlocal is_other, has_total
            self.buffers.before.put_back()
            buffers = list(kept.buffers())
            versions = _versions_of(buffers)
            result = self.call_loss(batch, replace(part, data=data), to_device(data, self.state.device))
            has_total = isinstance(result.get("loss") if isinstance(result, Mapping) else result, Mean)
            now = list(kept.buffers())
            is_other = is_other or list(map(id, now)) != list(map(id, buffers)) or _versions_of(now) != versions
            return split_loss(result, num_samples, "a part of a slice")

        def compare(whole: SliceLoss, cuts: Sequence[Sequence[SampleData]], of_parts: str = "of its parts") -> str:
            losses = [[compute(*each) for each in cut] for cut in cuts]
            return problem_of_mean(whole, losses, dtypes, has_total=has_total, of_parts=of_parts)

        try:
            with (
                self.buffers.of_step_begin(),
                torch.no_grad(),
                evaluation_mode(kept),
                without_compiler(),
                warnings.catch_warnings(action="ignore"),
            ):
                whole = compute(part.data, num_samples)
                self._purpose = f"{purpose}, once more"
                is_other = not torch.equal(whole.loss, compute(part.data, num_samples).loss) or is_other
                self._purpose = purpose
                problem = find_no_mean(SampleData(part.data, num_samples), batch, compute, compare)
        except Exception:  # noqa: BLE001, S110 - of the user's code, which need not have an evaluation mode
            pass
        finally:
            self._purpose = purpose
            is_other = is_other or any(left.changes())
            left.put_back()
        if problem and not is_other:
            raise no_mean(problem)

    def compute(self, batch: ShardedBatch, part: Slice) -> Tensor:
        """Run forward and backward of one slice by itself; return its loss, without a graph (local)."""
        loss, _, _ = read_loss(self.call_loss(batch, part, to_device(part.data, self.state.device)), part)
        with EXPLAINED_ERRORS:
            loss.backward()
        return loss.detach()

    def call_loss(self, batch: ShardedBatch, part: Slice, data: Any) -> Any:
        versions = _versions_of(part.data)

        def begin_again() -> Any:
            if versions != _versions_of(part.data):
                raise LossError(
                    "The loss function or the model has made a random generator, and has written to its input, so that "
                    "it cannot be called once more with the generator seeded. Make the generator where the model is "
                    "made. (LS518)"
                )
            self.buffers.before.put_back()
            seed_slice(self._purpose, self.state.seed, batch, part)
            return to_device(part.data, self.state.device)

        seed_slice(self._purpose, self.state.seed, batch, part)
        place = None
        if self._loss.takes_place:
            place = StepPlace(
                epoch=batch.cursor.epoch,
                step=batch.cursor.step,
                global_step=self.state.global_step,
                shard=part.shard,
                num_shards=batch.num_shards,
            )
        with self.state.autocast(), in_shard():
            return self._loss(self.state.model, data, place, begin_again=begin_again)


def _no_loss(_model: nn.Module, _batch: Any) -> Tensor:
    raise AssertionError("No update has begun.")


def _versions_of(data: Any) -> list[int]:
    """Return what shows that a loss function has written to its input, so that it cannot be called again with it."""
    return [version_of(each) for each in tree_leaves(data) if isinstance(each, Tensor) and not each.is_inference()]


def seed_slice(purpose: str, seed: int, batch: ShardedBatch, part: Slice) -> None:
    reseed_generators(derive_seed(purpose, seed, batch.cursor.epoch, batch.cursor.step, part.shard))
