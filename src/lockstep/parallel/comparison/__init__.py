"""What the ranks of a `DistributedDataParallel` compare in each backward, without a message of their own.

A *record* is what one rank has done since the last reduction: steps, options of optimizers, parameters, forwards. Each
rank sums it up in one number that travels with the status, behind the last bucket. Where the numbers differ, all ranks
see that, exchange their records and come to the same error, which all raise before any of them goes on. What is
compared is a list of checks; what a check is, and how to add one, is in `check`.

Invariants:

- Nothing is computed per gradient, and parameters are read as a whole only where there is a reason.
- A difference in the numbers alone is no error: records decide, by what they hold.
- What is found on all ranks alike (a step with gradients of one rank alone) is raised at once, where it is.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import World, calls_for
from lockstep.errors import LockstepError, ReductionError
from lockstep.parallel.comparison.check import Check, Lines, Reduced, Scope
from lockstep.parallel.comparison.data import DataSamplers, LoaderPositions, SameDataWarning, UnevenBatchWarning
from lockstep.parallel.comparison.draws import OverlappingParts, SameRandomNumbers
from lockstep.parallel.comparison.epochs import ToldEpochs
from lockstep.parallel.comparison.forwards import ForwardState
from lockstep.parallel.comparison.optimizers import listen_to_steps
from lockstep.parallel.comparison.order import ModelOrder, models_over
from lockstep.parallel.comparison.updates import WatchedSteps
from lockstep.parallel.comparison.values import LocalGradients
from lockstep.reduce import GroupStatus, RankStatus, Reducer, TrainedModel
from lockstep.reduce.buckets import Bucket
from lockstep.reduce.status import COMPARISON_LIMIT
from lockstep.torch_private.autograd import is_inside_func_grad

__all__ = ["ComparisonOptions", "RankComparison"]

_PURPOSE: Final = "comparing the ranks of a wrapped model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    model_number: int
    """Which of the models that were wrapped over this group it is: the same on every rank."""
    compares: bool
    """Whether more is compared than which backwards the ranks run."""
    nonfinite: Literal["stop", "skip"]
    on_skip: Literal["stop", "zeros"]


@final
class RankComparison:
    """Compares what the ranks of a wrapper do; a `BackwardObserver` of its reducer, which it holds weakly."""

    def __init__(
        self,
        model: TrainedModel,
        world: World,
        reducer: Reducer,
        options: ComparisonOptions,
        *,
        is_asynchronous: bool,
    ) -> None:
        may_read = not is_asynchronous  # else reading a parameter waits for its device
        self._skips_with_zeros = options.on_skip == "zeros"
        self._model = model
        self._world = world
        self._reducer = weakref.ref(reducer)
        self._wrapped = models_over(world)
        self._entry = self._wrapped.model(options.model_number)
        self._scopes = set(Scope) if options.compares else {Scope.CALLS}
        self._is_joining = False

        self.forwards = self._entry.forwards
        self.order = ModelOrder(model, self._wrapped, options.model_number, compares_names=options.compares)
        self._skipped = SkippedBatches(self._reducer)
        self._state = ForwardState(model)
        self._same_data = SameDataWarning(may_read=may_read)
        steps = self._steps = WatchedSteps(
            world, options.model_number, self._reducer, model, options.nonfinite, may_read=may_read
        )
        positions = LoaderPositions()
        # In this order the first error is raised: it is the cause of those that would come after it.
        self.checks: list[Check] = [
            self._skipped,
            self.order,
            DataSamplers(world),
            steps,
            steps.outside,
            self.forwards,
            self._state,
            steps.gradients,
            LocalGradients(self._reducer, may_read=may_read),
            positions,
            steps.finite,
            UnevenBatchWarning(),
            self._same_data,
            SameRandomNumbers(self._same_data, positions),
            OverlappingParts(positions),
            ToldEpochs(positions, steps.optimizers),
        ]
        self._know_parameters()
        self._entry.optimizers = steps.optimizers
        self._entry.reducer = self._reducer
        self._wrapped.watch()
        self._stop_listening = listen_to_steps(steps)

    def close(self) -> None:
        self._stop_listening()
        self._wrapped.forget(self._entry)

    # -- Around forwards -----------------------------------------------------------------------------------------------

    def begin_forward(self, *, is_training: bool) -> None:
        """Note that a forward begins (collective if a batch was skipped, and zeros stand for it)."""
        reducer = self._reducer()
        if reducer is None:
            return
        self._steps.note_forward(reducer)
        counts = is_training and reducer.watch.synchronizes
        if self._skips_with_zeros and counts and self.forwards.num_unused and not self._is_joining:
            self._begin_skipped()
            self._skipped.take_missed_step(self._steps.optimizers.stepped)
        self.forwards.begin_forward(counts=counts)

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Sequence[Tensor]) -> Callable[[], None] | None:
        """Note that a forward that autograd has recorded has ended; return what to call when a backward reaches it."""
        reducer = self._reducer()
        if reducer is not None and any(map(is_inside_func_grad, outputs)):
            reducer.watch.has_local_gradients = True
        self._state.end_forward(module, outputs)
        self._same_data.end_forward(inputs)
        return self.forwards.end_forward(outputs)

    def take_part_with_nothing(self) -> None:
        """Take part in a backward of the other ranks, without one of this rank (collective)."""
        self._begin_skipped()
        self._skipped.reduce_nothing()

    def let_ranks_differ(self) -> None:
        """Compare parameters, optimizers and their steps no more (each rank calls)."""
        self._scopes.discard(Scope.REPLICAS)
        self._choose()

    def watch_delayed(self, named: Mapping[str, nn.Parameter]) -> None:
        """Look for numbers that are not finite in the means of parameters that are in no bucket (local)."""
        self._steps.finite.delayed = {id(parameter): name for name, parameter in named.items()}

    def expect_writes(self) -> None:
        """Read all parameters after the next step: they may be written to now (local)."""
        self._steps.values.expect_writes()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may have run out of inputs: then nothing is compared (each rank calls)."""
        if self._is_joining == is_joining:
            return
        self._is_joining = is_joining
        self._choose()
        if not is_joining:
            self._reset(None)

    def _begin_skipped(self) -> None:
        self.begin()
        self.forwards.expect_no_backward()

    # -- Around a reduction (`BackwardObserver`) -----------------------------------------------------------------------

    def begin(self) -> None:
        for begin in self._begins:
            begin()

    def forget_begin(self) -> None:
        for forget in self._forgets:
            forget()

    def end_local(self) -> None:
        for end in self._local_ends:
            end()

    def look_at(self, bucket: Bucket) -> None:
        for look_at in self._looks:
            look_at(bucket)

    def fill_in(self, status: RankStatus) -> RankStatus:
        filled = status
        for fill_in in self._fills:
            filled = fill_in(filled)
        if self._is_joining:
            return status
        number = hash(tuple([check.number() for check in self.checks if check.is_compared]))
        return replace(filled, comparison=number % COMPARISON_LIMIT)

    def compare(self, status: GroupStatus) -> None:
        """Look at the status of all ranks (collective where they differ, which all see)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if status.changed:
            self._know_parameters()
        error = self._skipped.judge_status(status) or (None if status.agrees else self._exchange())
        self._reset(Reduced(number=reducer.num_reductions, status=status))
        if error is not None:
            self._reset(None)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def _exchange(self) -> LockstepError | None:
        """Return the first difference of another rank from rank 0 that matters (collective)."""
        compared = [check for check in self.checks if check.is_compared]
        lines = Lines(str(self.forwards.line), str(self._steps.optimizers.line))
        with calls_for(_PURPOSE):
            ranks = self._world.gather_objects((lines, [check.record() for check in compared]))
        lines_of_all = [each for each, _ in ranks]
        errors = [
            check.judge([records[index] for _, records in ranks], lines_of_all) for index, check in enumerate(compared)
        ]
        return next((error for error in errors if error is not None), None)

    def _reset(self, reduction: Reduced | None) -> None:
        for reset in self._resets:
            reset(reduction)

    def _choose(self) -> None:
        for check in self.checks:
            check.is_compared = check.scope in self._scopes and not self._is_joining
        # At most moments of a step most checks do nothing.
        self._begins, self._forgets, self._local_ends, self._looks, self._fills, self._resets = (
            [getattr(each, name) for each in self.checks if getattr(type(each), name) is not getattr(Check, name)]
            for name in ("begin", "forget_begin", "end_local", "look_at", "fill_in", "reset")
        )

    def _know_parameters(self) -> None:
        self._choose()
        named, module = self._model.parameters(), self._model.module
        for check in self.checks:
            check.know(named, module)


@final
class SkippedBatches(Check):
    """Takes part in reductions without a backward of this rank, with nothing where it skips a batch.

    rank 0                          rank 1
    ------                          ------
    forward                         forward: out of memory, the script goes on to the next batch
    backward: its gradients    <->  zeros, and "empty" in the status: the mean is over the other ranks
    optimizer.step()                optimizer.step(), by `take_missed_step`, or by the script after `skip_backward`
    next forward                    next forward
    """

    def __init__(self, reducer: "weakref.ref[Reducer]") -> None:
        self._reducer = reducer
        self._is_empty = False

    def reduce_nothing(self) -> None:
        """Take part in a reduction with what was accumulated under `no_sync`, or with nothing (collective)."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.watch.num_local_backwards:
            reducer.reduce_without_backward()
            return
        held = reducer.detach_gradients()
        self._is_empty = True
        try:
            reducer.reduce_without_backward()
        finally:
            self._is_empty = False
            for parameter, gradient in held:
                if parameter.grad is None:  # no rank had one
                    parameter.grad = gradient

    def take_missed_step(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the step that the others take after this backward; `.grad` is as before then (collective)."""
        reducer = self._reducer()
        if reducer is None:
            return
        held = reducer.detach_gradients()
        self.reduce_nothing()
        for optimizer in optimizers:
            optimizer.step()
        for parameter, gradient in held:
            parameter.grad = gradient

    def fill_in(self, status: RankStatus) -> RankStatus:
        return replace(status, is_empty=True) if self._is_empty else status

    def judge_status(self, status: GroupStatus) -> LockstepError | None:
        """Return what all ranks raise if none of them had anything to reduce (local)."""
        if len(status.empty) < len(status.comparisons):
            return None
        return ReductionError(
            "All ranks took part in a reduction with nothing. If a batch has several forwards before its backward, "
            'on_skip="zeros" cannot see which of them was skipped: call model.skip_backward() on the rank that '
            "skips. A batch that all ranks skip needs no call. (LS318)"
        )
