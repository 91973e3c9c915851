"""One rank's part in the comparison: filled in before the status leaves, looked at when that of all ranks is there."""

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from lockstep.comm import World, calls_for
from lockstep.errors import ParameterMismatchError, ReductionError
from lockstep.parallel.comparison.batches import SameDataWarning, UnevenBatchWarning
from lockstep.parallel.comparison.ending import EndOfScript
from lockstep.parallel.comparison.forwards import TrainingForwards
from lockstep.parallel.comparison.layers import ForwardState, warn_of_unlike_buffers, warn_of_unlike_layers
from lockstep.parallel.comparison.loaders import LoaderPositions
from lockstep.parallel.comparison.optimizers import has_optimizer, listen_to_steps
from lockstep.parallel.comparison.record import Kind, RankRecord, find_difference
from lockstep.parallel.comparison.samplers import DataSamplers
from lockstep.parallel.comparison.skipping import SkippedBatches
from lockstep.parallel.comparison.steps import WatchedSteps
from lockstep.parallel.comparison.values import ReplicaValues
from lockstep.parallel.comparison.wait_posts import WaitPosts
from lockstep.parallel.comparison.wrap_order import WrapOrder
from lockstep.reduce import GroupStatus, RankStatus, Reducer, TrainedModel
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.status import COMPARISON_LIMIT
from lockstep.torch_private.autograd import is_inside_func_grad
from lockstep.torch_private.modules import tree_leaves

_PURPOSE = "comparing the ranks of a wrapped model"
_LOOKS_FOR_SAMPLERS = 2
"""In which reduction samplers are looked for; it takes some milliseconds."""
_NUM_BETWEEN = 64
_NUM_WITH_DATA = 4
"""In the first so many of every `_NUM_BETWEEN` reductions is seen whether ranks have the same data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    model_number: int
    """Which of the models that were wrapped over this group it is: the same on every rank."""
    compares: bool
    """Whether more is compared than which backwards the ranks run."""
    nonfinite: Literal["stop", "skip"]
    skips_with_zeros: bool
    """Whether a rank that skips a batch takes part in the backward of the others with zeros."""
    is_asynchronous: bool
    """Whether reading a parameter waits for its device."""


@final
class RankComparison:
    """Compares what the ranks of a wrapper do; a `BackwardObserver` of its reducer, which it holds weakly."""

    def __init__(self, model: TrainedModel, world: World, reducer: Reducer, options: ComparisonOptions) -> None:
        may_read = not options.is_asynchronous
        self.forwards = TrainingForwards()
        self._skips_with_zeros = options.skips_with_zeros
        self._may_read = may_read
        self._model = model
        self._world = world
        self._reducer = weakref.ref(reducer)
        self._name = _describe_model(model, options.model_number)
        self._name_number = zlib.crc32(self._name.encode())
        self._batches = UnevenBatchWarning()
        self._same_data = SameDataWarning()
        self._samplers = DataSamplers(world)
        self._loaders = LoaderPositions()
        self._state = ForwardState(model)
        self._values = ReplicaValues(
            model.parameters, lambda: has_optimizer(self._steps.names.keys()), may_read=may_read
        )
        self._steps = WatchedSteps(
            world, options.model_number, self._reducer, self._values, options.nonfinite, may_read=may_read
        )
        self._compares = self._steps.compares_replicas = options.compares
        self._skipped = SkippedBatches(self._reducer)
        self.order = WrapOrder(world, options.model_number)
        self._is_fresh = self._was_fresh = True
        self._keeps_gradients = False
        self._num_forwards = 0
        self._know_parameters()
        self._ending = EndOfScript(world, self._name, options.model_number, self.forwards, self._steps.optimizers)
        self._posts = WaitPosts(self._reducer, self._ending.post_wait)
        self._stop_listening = listen_to_steps(self._steps)

    def close(self) -> None:
        self._stop_listening()
        self._ending.close()
        self._posts.close()

    # -- Around forwards -----------------------------------------------------------------------------------------------

    def begin_forward(self, *, is_training: bool) -> None:
        """Note that a forward begins (collective if a batch was skipped, and zeros stand for it)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.watch.has_local_gradients and self._values.was_written():
            self._steps.note_local_update(reducer)
        counts = is_training and reducer.watch.synchronizes
        if self._skips_with_zeros and counts and self.forwards.num_unused and not self._steps.is_joining:
            self._begin_skipped()
            self._skipped.take_missed_step(self._steps.optimizers.stepped)
        self.forwards.begin(counts=counts)

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Sequence[Tensor]) -> Callable[[], None] | None:
        """Note that a forward that autograd has recorded has ended; return what to call when a backward reaches it."""
        reducer = self._reducer()
        if reducer is not None and any(map(is_inside_func_grad, outputs)):
            reducer.watch.has_local_gradients = True
        self._state.note()
        if self._looks_at_data:
            self._same_data.note_inputs(tree_leaves(inputs))
        return self.forwards.end(module, outputs)

    def take_part_with_nothing(self) -> None:
        """Take part in a backward of the other ranks, without one of this rank (collective)."""
        self._begin_skipped()
        self._skipped.reduce_nothing()

    def let_ranks_differ(self) -> None:
        """Compare parameters, optimizers and their steps no more (each rank calls)."""
        self._steps.compares_replicas = False

    def expect_writes(self) -> None:
        """Read all parameters in the next backward: they may be written to now (local)."""
        self._values.expect_writes()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may have run out of inputs: then nothing is compared (each rank calls)."""
        if self._steps.is_joining and not is_joining:
            self._begin_anew()
        self._steps.is_joining = self._batches.is_expected = is_joining

    def _begin_skipped(self) -> None:
        self.begin()
        self.forwards.forget()

    # -- Around a reduction (`BackwardObserver`) -----------------------------------------------------------------------

    def begin(self) -> None:
        """Look at what `.grad` holds when the first backward since a reduction begins (local)."""
        self._was_fresh = self._is_fresh
        if self._is_fresh:
            self._is_fresh = False
            self._keeps_gradients = self._steps.gradients.are_kept()

    def forget_begin(self) -> None:
        self._is_fresh = self._is_fresh or self._was_fresh

    def look_at(self, bucket: Bucket) -> None:
        self._steps.finite.look_at(bucket)
        if self._looks_at_data:
            self._same_data.note_gradients(bucket)

    def fill_in(self, status: RankStatus) -> RankStatus:
        steps = self._steps
        nonfinite = steps.finite.take_number()
        if steps.is_joining:
            return status
        self._ending.note_begun()
        self._num_forwards = self.forwards.end_backward()
        numbers: tuple[int, ...] = (
            self._name_number,
            self.forwards.num_unused,
            self._loaders.number(),
        )
        if self._compares:
            numbers = (*numbers, self.forwards.is_training, self._keeps_gradients)
            numbers = (*numbers, self._samplers.number(), self._state.number())
        if steps.compares_replicas:
            done = steps.optimizers
            numbers = (*numbers, done.num_steps, done.number(), steps.gradient_number, self._values.number())
            numbers = (*numbers, steps.outside.number(), self._number_names())
        inputs, gradients = self._same_data.take_numbers()
        return replace(
            status,
            inputs=inputs,
            gradients=gradients,
            is_empty=self._skipped.is_empty,
            comparison=hash(numbers) % COMPARISON_LIMIT,
            nonfinite=nonfinite,
        )

    def compare(self, status: GroupStatus) -> None:
        """Look at the status of all ranks (collective where they differ, which all see)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if status.changed:
            self._know_parameters()
        steps, finding = self._steps, None
        if not status.agrees:
            with calls_for(_PURPOSE):
                records = self._world.gather_objects(self._record())
            finding = find_difference(records)
            self._loaders.compare([each.loaders for each in records], reducer.num_reductions)
            self._samplers.compare([each.samplers for each in records])
            steps.outside.compare([each.outside for each in records])
            if steps.compares_replicas:
                self._values.compare([each.values for each in records])
        self._skipped.refuse_nothing_of_all(status)
        steps.finite.note(status, reducer.num_reductions)
        self._batches.look_at(status)
        self._same_data.look_at(status)
        self._loaders.look(reducer.num_reductions)
        if reducer.num_reductions == _LOOKS_FOR_SAMPLERS:
            self._samplers.find()
        if steps.optimizers.num_steps and not steps.is_joining:
            # One batch per step, however many forwards and backwards it has.
            self._samplers.count(status.batch_sizes[self._world.rank] // max(1, self._num_forwards))
        steps.gradients.note_reduced()
        steps.begin_anew()
        self._is_fresh = True
        if finding is not None:
            self._begin_anew()
            kind = ParameterMismatchError if finding.kind is Kind.REPLICAS else ReductionError
            raise kind(finding.text)

    def _number_names(self) -> int:
        reducer = self._reducer()
        return 0 if reducer is None else self.order.number_names(self._model.module, reducer.num_reductions)

    def _record(self) -> RankRecord:
        steps, compares = self._steps, self._steps.compares_replicas
        done = steps.optimizers
        return RankRecord(
            model=self._name,
            is_training=self.forwards.is_training or not self._compares,
            num_unused_forwards=self.forwards.num_unused,
            keeps_gradients=self._keeps_gradients and self._compares,
            num_steps=done.num_steps,
            options=done.describe(steps.names) if compares else (),
            gradients=steps.gradient_number,
            values=self._values.describe() if compares else {},
            states=done.describe_states() if compares else (),
            outside=steps.outside.describe() if compares else (),
            names=self.order.describe(),
            samplers=self._samplers.describe() if self._compares else (),
            loaders=self._loaders.describe(),
            state=self._state.describe() if self._compares else {},
            instructions=torch.backends.cpu.get_cpu_capability(),
            forward_line=str(self.forwards.line),
            step_line=str(done.line),
        )

    def _begin_anew(self) -> None:
        self._steps.begin_anew()
        self._steps.gradients.forget()
        self.forwards.forget()
        self._is_fresh = True
        self._values.expect_writes()

    @property
    def _looks_at_data(self) -> bool:
        reducer = self._reducer()
        return self._may_read and reducer is not None and reducer.num_reductions % _NUM_BETWEEN < _NUM_WITH_DATA

    def _know_parameters(self) -> None:
        self._values.look()
        module = self._model.module
        self._steps.know(self._model.parameters(), [] if module is None else list(module.parameters()))


def compare_at_start(model: TrainedModel, world: World, model_number: int, *, sends_buffers: bool) -> None:
    """Compare a model that is wrapped with those of the other ranks, before it gets rank 0's values (collective)."""
    WrapOrder(world, model_number).compare_values(model)
    warn_of_unlike_layers(model, world)
    if not sends_buffers:
        warn_of_unlike_buffers(model, world)


def _describe_model(model: TrainedModel, number: int) -> str:
    first = model.trained[0].spec
    shape = "x".join(map(str, first.shape)) or "scalar"
    return (
        f"wrapped model {number} ({type(model.module).__name__} with {len(model.trained)} trained parameters, "
        f"{first.name} of {shape} the first)"
    )
