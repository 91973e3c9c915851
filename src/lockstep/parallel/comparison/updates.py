"""What one rank's optimizers do with the wrapped parameters: looked at before and after each step, and compared.

How steps are seen is in `optimizers`, what is read of parameters and gradients in `values`.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.errors import LockstepError, ParameterMismatchError, ReductionError, counted
from lockstep.parallel.comparison.check import (
    SWITCH,
    Check,
    Lines,
    Reduced,
    Scope,
    find_objects,
    others_than_first,
    warn_once,
)
from lockstep.parallel.comparison.finite import FiniteGradients, FiniteGradientsOnDevice
from lockstep.parallel.comparison.optimizers import (
    IdleOptimizers,
    OptimizerSteps,
    OutsideParameters,
    has_optimizer,
    sum_up_state,
)
from lockstep.parallel.comparison.values import (
    HandAveraging,
    ReplicaValues,
    StepGradients,
    Value,
    Values,
    differ_by_rounding,
    has_unsynchronized,
    odd_parameters,
)
from lockstep.processes.user_line import user_line
from lockstep.reduce import Reducer, TrainedModel
from lockstep.reduce.backward_watch import Phase
from lockstep.reduce.model import Description, describe_differences
from lockstep.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id
from lockstep.torch_private.modules import optimizer_step_pre_hooks

_NUM_LOCAL_UPDATES: Final = 4
"""So many forwards in a row without a reduction show that weights which were written to stay. [Note: what lasts]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    num_steps: int
    options: Sequence[Description]
    """Of the optimizers that have stepped, in the order of their steps."""
    gradients: int
    """A number for the gradients that were given to these steps; 0 where nobody has changed them."""
    values: Values
    were_moved: bool
    """Whether something but the optimizers has ever written to the parameters."""
    states: Sequence[Mapping[str, int]]
    """A number for each entry of the state of these optimizers, summed up over parameters."""
    scales: Sequence[float]
    """Of the GradScalers of this process."""
    instructions: str
    """Which instructions of the processor torch uses."""


@final
class WatchedSteps(Check):
    """Compares the steps of the ranks' optimizers, what they are given and what they leave; a `StepListener`."""

    scope = Scope.REPLICAS

    def __init__(
        self,
        world: World,
        model_number: int,
        reducer: "weakref.ref[Reducer]",
        model: TrainedModel,
        nonfinite: Literal["stop", "skip"],
        *,
        may_read: bool,
    ) -> None:
        self.optimizers = OptimizerSteps()
        self.values = ReplicaValues(model.parameters, lambda: has_optimizer(self._names.keys()), may_read=may_read)
        self.gradients = StepGradients(reducer, world.world_size, may_read=may_read)
        self.finite = (FiniteGradients if may_read else FiniteGradientsOnDevice)(nonfinite)
        self.outside = OutsideParameters(may_read=may_read)
        self._world = world
        self._reducer = reducer
        self._gradient_number = 0
        """0 if nobody has changed the gradients of the steps since the last reduction."""
        self._names: Mapping[int, str] = {}
        self._idle = IdleOptimizers()
        self._by_hand = HandAveraging(world, model_number)
        self._trained: Mapping[str, nn.Parameter] = {}
        self._ignored: set[int] = set()
        self._num_reduced = self._num_local_updates = 0
        self._local_after = -1
        self._has_warned = False

    def know(self, named: Sequence[tuple[str, nn.Parameter]], module: nn.Module | None) -> None:
        self.optimizers.held.clear()
        self._names = {id(parameter): name for name, parameter in named}
        self._ignored = set() if module is None else set(map(id, module.parameters()))
        self._trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.values.look()

    # -- What is compared ----------------------------------------------------------------------------------------------

    def number(self) -> int:
        steps = self.optimizers
        return hash((steps.num_steps, steps.number(), self._gradient_number, self.values.number()))

    def record(self) -> UpdateRecord:
        values = self.values.describe()
        return UpdateRecord(
            num_steps=self.optimizers.num_steps,
            options=self.optimizers.describe(self._names),
            gradients=self._gradient_number,
            values=values,
            were_moved=self.values.were_moved,
            states=tuple(map(sum_up_state, self.optimizers.stepped)),
            scales=tuple(sorted(each.get_scale() for each in find_objects(GradScaler))),
            instructions=torch.backends.cpu.get_cpu_capability(),
        )

    def judge(self, found: Sequence[UpdateRecord], lines: Sequence[Lines]) -> LockstepError | None:
        self.values.compare([each.values for each in found])
        for compare in (_compare_options, _compare_num_steps, _compare_scales, _compare_gradients):
            for rank, record in others_than_first(found):
                error = compare(rank, record, found[0], lines)
                if error is not None:
                    return error
        for rank, record in others_than_first(found):
            odd = odd_parameters(record.values, found[0].values)
            if not odd:
                continue
            may_round = any(each.were_moved for each in found) and record.instructions == found[0].instructions
            if may_round and differ_by_rounding(record.values, found[0].values, odd):
                self.values.stop()
                self._warn_of_rounding(rank, odd[0], record.values[odd[0]], found[0].values[odd[0]])
                return None
            return _describe_values(rank, odd[0], record, found[0], lines)
        return None

    def reset(self, reduction: Reduced | None) -> None:
        self.optimizers.begin_anew()
        self._gradient_number = 0
        if reduction is None:
            self.values.expect_writes()

    # -- Around steps (`StepListener`) ---------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        reducer, held = self._reducer(), self.optimizers.parameters_of(optimizer, self._names, self._ignored)
        if reducer is None or not self._world.has_group:
            return
        if self.is_compared and held.others and reducer.num_reductions > 0:
            self._idle.look_at(optimizer, held, self._trained, self.optimizers.owned, reducer.num_reductions)
        delayed = [each for each in held.all if id(each) in self.finite.delayed] if self.finite.delayed else []
        if not held.known:
            if delayed:
                self.finite.before_step(optimizer, delayed)
            return
        if self.is_compared:
            self._check_reduced(reducer, held.known)
        if reducer.num_reductions > self._num_reduced:
            reducer.watch.has_local_gradients = False  # taken beside those of a reduction: for a log, say
        self._warn_of_local_gradients(reducer)
        self.finite.before_step(optimizer, [*held.known, *delayed] if delayed else held.known)
        if self.is_compared:
            self.values.begin_update()
            self._gradient_number = hash((self._gradient_number, self.gradients.number_of_step()))
        self.optimizers.begin(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        held = self.optimizers.parameters_of(optimizer, self._names, self._ignored)
        reducer = self._reducer()
        if held.others and reducer is not None and reducer.num_reductions > 0:
            self.outside.note_step(optimizer, held)
        self.finite.after_step(optimizer)
        if held.known and self.is_compared and optimizer_step_pre_hooks(optimizer):  # of the user's, called after ours
            self._gradient_number = hash((self._gradient_number, self.gradients.number_of_step()))
        if held.known:
            self.optimizers.end(optimizer)
            self.gradients.note_step()
            if not self.optimizers.running:
                self.values.end_update(reads=self.is_compared)
            self._num_reduced = self._num_reduced if reducer is None else reducer.num_reductions

    def note_forward(self, reducer: Reducer) -> None:
        """Note a forward with parameters that were written to, and local gradients: in some, they are put back."""
        if not reducer.watch.has_local_gradients or not self.values.was_written():
            return
        is_next = self._local_after == reducer.num_reductions
        self._num_local_updates = self._num_local_updates + 1 if is_next else 1
        self._local_after = reducer.num_reductions
        if self._num_local_updates >= _NUM_LOCAL_UPDATES:
            self._warn_of_local_gradients(reducer)

    def _warn_of_rounding(self, rank: int, name: str, here: Value, there: Value) -> None:
        warn_once(
            f"Parameters differ by their rounding: {name} adds up to {here.total!r} on rank {rank} and to "
            f"{there.total!r} on rank 0. Something moves the weights in each step and puts them back by a calculation "
            "(add_() and then sub_()), which rounds otherwise on each rank, so that the ranks drift apart slowly. Keep "
            "a copy of the weights, and put that back with copy_(). Parameters are compared no more. (LS313)",
            "Parameters differ by their rounding",
        )

    def _warn_of_local_gradients(self, reducer: Reducer) -> None:
        """Warn if `torch.autograd.grad` has given gradients of this rank alone since the last reduction."""
        if not reducer.watch.has_local_gradients:
            return
        reducer.watch.has_local_gradients = False
        if not self._has_warned:
            self._has_warned = True
            warn_once(
                "torch.autograd.grad or torch.func gave gradients of this rank alone for parameters of a model that is "
                "trained on several, and parameters were updated without a backward() since: these gradients are not "
                "averaged. Call backward() for averaged ones, or average these with torch.distributed.all_reduce. "
                "(LS311)",
                "torch.autograd.grad or torch.func gave",
            )

    def _check_reduced(self, reducer: Reducer, parameters: Sequence[nn.Parameter]) -> None:
        is_inside = reducer.watch.phase is not Phase.IDLE and current_graph_task_id() != NO_GRAPH_TASK
        if is_inside:
            raise ReductionError(
                f"An optimizer stepped inside a backward, at {user_line()}, with gradients of this rank alone: they "
                "are averaged over the ranks at the end of the backward. Call step() after backward(). To train each "
                "rank on its own for a while, wrap the module with compare=False. (LS311)"
            )
        name = has_unsynchronized(reducer, parameters) if reducer.watch.num_local_backwards else ""
        if name and self._by_hand.is_done(parameters):
            reducer.watch.forget_local()
        elif name:
            raise ReductionError(
                f"The optimizer steps at {user_line()} with gradients of this rank alone: that of {name}, for one, was "
                "accumulated under no_sync() and not averaged since, so each rank would get other parameters. Run the "
                "last forward and backward before a step outside no_sync(), or average every gradient yourself before "
                "it. To train each rank on its own for a while, wrap the module with compare=False. (LS311)"
            )


def _compare_options(
    rank: int, record: UpdateRecord, first: UpdateRecord, lines: Sequence[Lines]
) -> LockstepError | None:
    if len(record.options) != len(first.options):
        return None
    for found, expected in zip(record.options, first.options, strict=True):
        if found != expected:
            return ParameterMismatchError(
                f"The optimizers of ranks {rank} and 0 differ: {describe_differences(found, expected)}. The last step "
                f"was at {lines[0].step}. Give optimizers the same options on every rank, and step schedulers "
                "alike: a scheduler that follows a loss needs the mean over the ranks, not each rank's own. "
                f"{SWITCH} (LS313)",
            )
    return None


def _compare_num_steps(
    rank: int, record: UpdateRecord, first: UpdateRecord, lines: Sequence[Lines]
) -> LockstepError | None:
    if record.num_steps == first.num_steps:
        return None
    odd = odd_parameters(record.values, first.values)
    more, fewer = (rank, 0) if record.num_steps > first.num_steps else (0, rank)
    return ParameterMismatchError(
        f"Since the last backward, rank {rank} has taken {counted(record.num_steps, 'optimizer step')} and rank 0 "
        f"{first.num_steps}{f', so their parameters differ, {odd[0]} for one' if odd else ''}. Rank {more} stepped at "
        f"{lines[more].step}, and rank {fewer} did not, or rank {more} stepped without a backward for a batch that it "
        "has skipped. Step the optimizer on every rank or on none: decide by a number that is the same on all, such as "
        "the sum of a flag over the ranks. LBFGS decides by what its closure returns: the mean loss over the ranks. "
        f"Where a rank skips a batch, call model.skip_backward() in place of backward(). {SWITCH} (LS321)",
    )


def _compare_scales(
    rank: int, record: UpdateRecord, first: UpdateRecord, lines: Sequence[Lines]
) -> LockstepError | None:
    odd = odd_parameters(record.values, first.values)
    if record.scales == first.scales or not odd:
        return None
    scales = [", ".join(map(str, each.scales)) or "none" for each in (record, first)]
    return ParameterMismatchError(
        f"The scale of the GradScaler is {scales[0]} on rank {rank} and {scales[1]} on rank 0: the gradients of the "
        f"ranks were averaged with other scales, and then divided by each rank's own, at {lines[0].step}. Parameter "
        f"{odd[0]} differs since. Make the scaler with the same init_scale on every rank, load its state on every rank "
        f"or on none, and call step() and update() alike. {SWITCH} (LS313)",
    )


def _compare_gradients(
    rank: int, record: UpdateRecord, first: UpdateRecord, lines: Sequence[Lines]
) -> LockstepError | None:
    odd = odd_parameters(record.values, first.values)
    if record.gradients == first.gradients or not odd:
        return None
    return ParameterMismatchError(
        f"The gradients with which rank {rank} stepped its optimizer at {lines[rank].step} were not those of rank 0: "
        "the backward had left the same on both, and then .grad was changed on one rank, or otherwise. Parameter "
        f"{odd[0]} differs since. Clip, scale and clear gradients alike on every rank, by numbers that are the same on "
        f"all. {SWITCH} (LS313)",
    )


def _describe_values(
    rank: int, name: str, record: UpdateRecord, first: UpdateRecord, lines: Sequence[Lines]
) -> ParameterMismatchError:
    states = [
        name
        for found, expected in zip(record.states, first.states, strict=False)
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    if states and len(record.states) == len(first.states) and record.instructions == first.instructions:
        cause = (
            f"The state of their optimizers differs too ({', '.join(states[:3])}): a state that was loaded on one rank "
            f"only gives other steps there. The last step was at {lines[0].step}. Load the optimizer's state on "
            f"every rank. {SWITCH}"
        )
    elif record.instructions != first.instructions:
        cause = (
            f"torch computes with other instructions of the processor on rank {rank} ({record.instructions}) than on "
            f"rank 0 ({first.instructions}), so an optimizer's step rounds otherwise. Set ATEN_CPU_CAPABILITY to what "
            "all processors have, as ATEN_CPU_CAPABILITY=avx2, on every rank; or wrap with compare=False, and the "
            "replicas drift apart slowly, as they do with torch's wrapper."
        )
    else:
        cause = (
            "It was written on one rank, or with other values on each: by a checkpoint that was loaded, an "
            "initialisation, or averaged weights that were swapped in, after wrapping; or the ranks began with other "
            "values and init_sync=False. Write the same values on every rank, or on rank 0 before wrapping, which "
            f"sends rank 0's to all. {SWITCH}"
        )
    return ParameterMismatchError(
        f"Parameter {name} has other values on rank {rank} than on rank 0: they add up to "
        f"{record.values[name].total!r} and {first.values[name].total!r}. {cause} The last forward was at "
        f"{lines[rank].forward} on rank {rank}. (LS313)",
    )
