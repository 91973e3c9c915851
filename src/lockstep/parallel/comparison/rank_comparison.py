"""One rank's part in the comparison: filled in before the status leaves, looked at when that of all ranks is there."""

import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import World, calls_for
from lockstep.errors import ParameterMismatchError, ReductionError
from lockstep.parallel.comparison.batches import SameDataWarning, UnevenBatchWarning
from lockstep.parallel.comparison.finite import FiniteGradients
from lockstep.parallel.comparison.forwards import TrainingForwards
from lockstep.parallel.comparison.gradients import StepGradients, has_unsynchronized
from lockstep.parallel.comparison.optimizers import OptimizerSteps, listen_to_steps
from lockstep.parallel.comparison.record import Kind, RankRecord, find_difference
from lockstep.parallel.comparison.samplers import ShufflingSamplers
from lockstep.parallel.comparison.skipping import SkippedBatches
from lockstep.parallel.comparison.values import ReplicaValues
from lockstep.parallel.user_code import stacklevel_of_user, user_line
from lockstep.reduce import GroupStatus, RankStatus, Reducer, TrainedModel
from lockstep.reduce.backward_watch import Phase
from lockstep.reduce.bucket_set import Bucket
from lockstep.reduce.status import COMPARISON_LIMIT
from lockstep.torch_private import NO_GRAPH_TASK, current_graph_task_id, is_inside_func_grad, tree_leaves

_PURPOSE = "comparing the ranks of a wrapped model"
_LOCAL_GRADIENTS = (
    "torch.autograd.grad or torch.func gave gradients of this rank alone for parameters of a model that is trained on "
    "several, and parameters were updated without a backward() since: these gradients are not averaged. Call "
    "backward() for averaged ones, or average these with torch.distributed.all_reduce. This warning is given once."
)
_LOOKS_FOR_SAMPLERS = 2
"""In which reduction samplers are looked for; it takes some milliseconds."""
_NUM_BETWEEN = 64
_NUM_WITH_DATA = 4
"""In the first so many of every `_NUM_BETWEEN` reductions is seen whether ranks have the same data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """How the ranks of a wrapper are compared."""

    model_number: int
    """Which of the models that were wrapped over this group it is: the same on every rank."""
    compares_replicas: bool
    """Whether parameters, optimizers and their steps must be the same on all ranks."""
    nonfinite: Literal["stop", "skip"]
    """What becomes of optimizer steps with gradients that are not finite."""
    skips_with_zeros: bool
    """Whether a rank that skips a batch takes part in the backward of the others with zeros."""
    is_asynchronous: bool
    """Whether reading a parameter waits for its device."""


@final
class RankComparison:
    """Compares what the ranks of a wrapper do; a `BackwardObserver` of its reducer, and a `StepListener`.

    Args:
        model: The wrapped model.
        world: The ranks.
        reducer: Reduces its gradients; held weakly, for it holds this.
        options: How.

    Attributes:
        compares_replicas: Whether parameters, optimizers and their steps must be the same on all ranks.
        forwards: The training forwards of this rank.
        close: Listens to optimizers no more.
    """

    def __init__(self, model: TrainedModel, world: World, reducer: Reducer, options: ComparisonOptions) -> None:
        may_read = not options.is_asynchronous
        self.compares_replicas = options.compares_replicas
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
        self._samplers = ShufflingSamplers(world)
        self._values = ReplicaValues(model, may_read=may_read)
        self._gradients = StepGradients(self._reducer, may_read=may_read)
        self._finite = FiniteGradients(options.nonfinite, may_read=may_read)
        self._steps = OptimizerSteps()
        self._skipped = SkippedBatches(self._reducer)
        self._is_joining = False
        self._is_fresh = self._was_fresh = True
        self._num_reduced = 0
        self._keeps_gradients = False
        self._step_gradients = 0
        self._num_forwards = 0
        self._has_warned = False
        self._know_parameters()
        self.close: Callable[[], None] = listen_to_steps(self)

    # -- Around forwards -----------------------------------------------------------------------------------------------

    def begin_forward(self, *, is_training: bool) -> None:
        """Note that a forward begins (collective if a batch was skipped, and zeros stand for it)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.watch.has_local_gradients and self._values.was_written():
            self._warn_of_local_gradients(reducer)
        counts = is_training and reducer.watch.synchronizes
        if self._skips_with_zeros and counts and self.forwards.num_unused and not self._is_joining:
            self._begin_skipped()
            self._skipped.take_missed_step(self._steps.optimizers)
        self.forwards.begin(counts=counts)

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Sequence[Tensor]) -> Callable[[], None] | None:
        """Note that a forward that autograd has recorded has ended; return what to call when a backward reaches it."""
        reducer = self._reducer()
        if reducer is not None and any(map(is_inside_func_grad, outputs)):
            reducer.watch.has_local_gradients = True
        if self._looks_at_data:
            self._same_data.note_inputs(tree_leaves(inputs))
        return self.forwards.end(module, outputs)

    def take_part_with_nothing(self) -> None:
        """Take part in a backward of the other ranks, without one of this rank (collective)."""
        self._begin_skipped()
        self._skipped.reduce_nothing()

    def expect_writes(self) -> None:
        """Read all parameters in the next backward: they may be written to now (local)."""
        self._values.expect_writes()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may have run out of inputs: then nothing is compared (each rank calls)."""
        if self._is_joining and not is_joining:
            self._begin_anew()
        self._is_joining = self._batches.is_expected = is_joining

    def _begin_skipped(self) -> None:
        self.begin()
        self.forwards.forget()

    # -- Around a reduction (`BackwardObserver`) -----------------------------------------------------------------------

    def begin(self) -> None:
        """Look at what `.grad` holds when the first backward since a reduction begins (local)."""
        self._was_fresh = self._is_fresh
        if self._is_fresh:
            self._is_fresh = False
            self._keeps_gradients = self._gradients.are_kept()

    def forget_begin(self) -> None:
        """Look again when the next backward begins: this one has accumulated nothing (local)."""
        self._is_fresh = self._is_fresh or self._was_fresh

    def look_at(self, bucket: Bucket) -> None:
        """Look at this rank's gradients (local)."""
        self._finite.look_at(bucket)
        if self._looks_at_data:
            self._same_data.note_gradients(bucket)

    def fill_in(self, status: RankStatus) -> RankStatus:
        """Return the status with what there is to compare (local)."""
        if self._is_joining:
            return status
        self._num_forwards = self.forwards.end_backward()
        numbers: tuple[int, ...] = (
            self._name_number,
            self.forwards.is_training,
            self.forwards.num_unused,
            self._keeps_gradients,
            self._samplers.number(),
        )
        if self.compares_replicas:
            steps = self._steps
            numbers = (*numbers, steps.num_steps, steps.number(), self._step_gradients, self._values.number())
        return replace(
            self._same_data.fill_in(status),
            is_empty=self._skipped.is_empty,
            comparison=hash(numbers) % COMPARISON_LIMIT,
            nonfinite=self._finite.take_number(),
        )

    def compare(self, status: GroupStatus) -> None:
        """Look at the status of all ranks (collective where they differ, which all see).

        Raises:
            ParameterMismatchError: The replicas are no longer the same.
            ReductionError: The ranks make other calls.
        """
        reducer = self._reducer()
        if reducer is None:
            return
        if status.changed:
            self._know_parameters()
        finding = None
        if not status.agrees:
            with calls_for(_PURPOSE):
                finding = find_difference(self._world.gather_objects(self._record()))
        self._skipped.correct_mean(status)
        self._finite.note(status, reducer.num_reductions)
        self._batches.look_at(status)
        self._same_data.look_at(status)
        if reducer.num_reductions == _LOOKS_FOR_SAMPLERS:
            self._samplers.find()
        if self._steps.num_steps and not self._is_joining:
            # One batch per step, however many forwards and backwards it has.
            self._samplers.count(status.batch_sizes[self._world.rank] // max(1, self._num_forwards))
        self._gradients.note_reduced()
        self._steps.begin_anew()
        self._step_gradients = 0
        self._is_fresh = True
        if finding is not None:
            self._begin_anew()
            kind = ParameterMismatchError if finding.kind is Kind.REPLICAS else ReductionError
            raise kind(finding.text)

    def _record(self) -> RankRecord:
        compares = self.compares_replicas
        return RankRecord(
            model=self._name,
            is_training=self.forwards.is_training,
            num_unused_forwards=self.forwards.num_unused,
            keeps_gradients=self._keeps_gradients,
            num_steps=self._steps.num_steps,
            options=self._steps.describe(self._known) if compares else (),
            gradients=self._step_gradients,
            values=self._values.describe() if compares else {},
            states=self._steps.describe_states() if compares else (),
            samplers=self._samplers.describe(),
            forward_line=str(self.forwards.line),
            step_line=str(self._steps.line),
        )

    def _begin_anew(self) -> None:
        self._steps.begin_anew()
        self._gradients.forget()
        self.forwards.forget()
        self._step_gradients = 0
        self._is_fresh = True
        self._values.expect_writes()

    # -- Around an optimizer's step (`StepListener`) -------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what the optimizer is given (local).

        Raises:
            ReductionError: Its gradients are those of this rank alone.
            LossError: They are not finite, on every rank alike.
        """
        reducer, parameters = self._reducer(), self._steps.parameters_of(optimizer, self._known)
        if reducer is None or not parameters or not self._world.has_group:
            return
        if not self._is_joining and self.compares_replicas:
            self._check_reduced(reducer, parameters)
        if reducer.num_reductions > self._num_reduced:
            reducer.watch.has_local_gradients = False  # taken beside those of a reduction: for a log, say
        if reducer.watch.has_local_gradients:
            self._warn_of_local_gradients(reducer)
        self._finite.before_step(optimizer, parameters)
        self._steps.begin(optimizer)
        if self.compares_replicas:
            self._step_gradients = hash((self._step_gradients, self._gradients.number()))

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at what the optimizer has left (local)."""
        if self._steps.parameters_of(optimizer, self._known):
            self._steps.end(optimizer)
            self._finite.after_step()
            self._gradients.note_step()
            self._values.note_update()
            reducer = self._reducer()
            self._num_reduced = self._num_reduced if reducer is None else reducer.num_reductions

    def _check_reduced(self, reducer: Reducer, parameters: Sequence[nn.Parameter]) -> None:
        is_inside = reducer.watch.phase is not Phase.IDLE and current_graph_task_id() != NO_GRAPH_TASK
        if is_inside:
            raise ReductionError(
                f"An optimizer stepped inside a backward, at {user_line()}, with gradients of this rank alone: they "
                "are averaged over the ranks at the end of the backward. Call step() after backward()."
            )
        name = has_unsynchronized(reducer, parameters) if reducer.watch.num_local_backwards else ""
        if name:
            raise ReductionError(
                f"The optimizer steps at {user_line()} with gradients of this rank alone: that of {name}, for one, was "
                "accumulated under no_sync() and not averaged since, so each rank would get other parameters. Run the "
                "last forward and backward before a step outside no_sync(). If you average them yourself, or train "
                "each rank on its own for a while, wrap the module with compare=False."
            )

    def _warn_of_local_gradients(self, reducer: Reducer) -> None:
        reducer.watch.has_local_gradients = False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(_LOCAL_GRADIENTS, stacklevel=stacklevel_of_user())

    @property
    def _looks_at_data(self) -> bool:
        reducer = self._reducer()
        return self._may_read and reducer is not None and reducer.num_reductions % _NUM_BETWEEN < _NUM_WITH_DATA

    def _know_parameters(self) -> None:
        self._values.look()
        self._steps.forget_parameters()
        named = self._model.parameters()
        self._known = {id(parameter): name for name, parameter in named}
        self._finite.know([name for name, _ in named])


def _describe_model(model: TrainedModel, number: int) -> str:
    first = model.trained[0].spec
    shape = "x".join(map(str, first.shape)) or "scalar"
    return (
        f"wrapped model {number} ({type(model.module).__name__} with {len(model.trained)} trained parameters, "
        f"{first.name} of {shape} the first)"
    )
