"""What the optimizers of one rank do with the wrapped parameters: looked at before and after each step."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal, final

from torch import nn
from torch.optim import Optimizer

from lockstep.comm import World
from lockstep.errors import ReductionError
from lockstep.parallel.comparison.by_hand import HandAveraging
from lockstep.parallel.comparison.finite import FiniteCheck, FiniteGradients
from lockstep.parallel.comparison.finite_on_device import FiniteGradientsOnDevice
from lockstep.parallel.comparison.gradients import StepGradients, has_unsynchronized
from lockstep.parallel.comparison.optimizers import OptimizerSteps
from lockstep.parallel.comparison.outside import IdleOptimizers, OutsideParameters
from lockstep.parallel.comparison.values import ReplicaValues
from lockstep.processes.user_line import stacklevel_of_user, user_line
from lockstep.reduce import Reducer
from lockstep.reduce.backward_watch import Phase
from lockstep.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

_LOCAL_GRADIENTS = (
    "torch.autograd.grad or torch.func gave gradients of this rank alone for parameters of a model that is trained on "
    "several, and parameters were updated without a backward() since: these gradients are not averaged. Call "
    "backward() for averaged ones, or average these with torch.distributed.all_reduce. "
    "This warning is given once. (LS311)"
)
_NUM_LOCAL_UPDATES = 4
"""So many forwards in a row without a reduction show that such weights stay. [Note: what lasts]"""


@final
class WatchedSteps:
    """The steps of one rank's optimizers with what they are given; a `StepListener`.

    `may_read` is False on an asynchronous device, where reading would wait. `gradient_number` is 0 if nobody has
    changed the gradients of the steps since the last reduction.
    """

    def __init__(
        self,
        world: World,
        model_number: int,
        reducer: "weakref.ref[Reducer]",
        values: ReplicaValues,
        nonfinite: Literal["stop", "skip"],
        *,
        may_read: bool,
    ) -> None:
        self.optimizers = OptimizerSteps()
        self.gradients = StepGradients(reducer, may_read=may_read)
        self.finite: FiniteCheck = FiniteGradients(nonfinite) if may_read else FiniteGradientsOnDevice(nonfinite)
        self.outside = OutsideParameters(may_read=may_read)
        self.compares_replicas = True
        self.is_joining = False
        self.gradient_number = 0
        self.names: Mapping[int, str] = {}
        self._world = world
        self._reducer = reducer
        self._values = values
        self._idle = IdleOptimizers()
        self._by_hand = HandAveraging(world, model_number)
        self._trained: Mapping[str, nn.Parameter] = {}
        self._ignored: set[int] = set()
        self._num_reduced = self._num_local_updates = 0
        self._local_after = -1
        self._has_warned = False

    def know(self, named: Sequence[tuple[str, nn.Parameter]], ignored: Sequence[nn.Parameter]) -> None:
        """Note the parameters of the model, and those of them that the wrapper leaves to others (local)."""
        self.optimizers.forget_parameters()
        self.names = {id(parameter): name for name, parameter in named}
        self._ignored = set(map(id, ignored))
        self._trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.finite.know([name for name, _ in named])

    def before_step(self, optimizer: Optimizer) -> None:
        reducer, held = self._reducer(), self.optimizers.parameters_of(optimizer, self.names, self._ignored)
        if reducer is None or not self._world.has_group:
            return
        compares = self.compares_replicas and not self.is_joining
        if compares and held.others and reducer.num_reductions > 0:
            self._idle.look_at(optimizer, held, self._trained, self.optimizers.owned, reducer.num_reductions)
        if not held.known:
            return
        if compares:
            self._check_reduced(reducer, held.known)
        if reducer.num_reductions > self._num_reduced:
            reducer.watch.has_local_gradients = False  # taken beside those of a reduction: for a log, say
        self.warn_of_local_gradients(reducer)
        self.finite.before_step(optimizer, held.known)
        self._values.begin_update()
        self.optimizers.begin(optimizer)
        if self.compares_replicas:
            self.gradient_number = hash((self.gradient_number, self.gradients.number()))

    def after_step(self, optimizer: Optimizer) -> None:
        held = self.optimizers.parameters_of(optimizer, self.names, self._ignored)
        reducer = self._reducer()
        if held.others and reducer is not None and reducer.num_reductions > 0 and not self.is_joining:
            self.outside.note_step(optimizer, held)
        if held.known:
            self.optimizers.end(optimizer)
            self.finite.after_step(optimizer)
            self.gradients.note_step()
            if not self.optimizers.is_stepping:
                self._values.end_update()
            self._num_reduced = self._num_reduced if reducer is None else reducer.num_reductions

    def begin_anew(self) -> None:
        self.optimizers.begin_anew()
        self.gradient_number = 0

    def note_local_update(self, reducer: Reducer) -> None:
        """Note a forward with parameters that were written to, and local gradients: in some, they are put back."""
        is_next = self._local_after == reducer.num_reductions
        self._num_local_updates = self._num_local_updates + 1 if is_next else 1
        self._local_after = reducer.num_reductions
        if self._num_local_updates >= _NUM_LOCAL_UPDATES:
            self.warn_of_local_gradients(reducer)

    def warn_of_local_gradients(self, reducer: Reducer) -> None:
        """Warn, once, if `torch.autograd.grad` has given gradients of this rank alone since the last reduction."""
        if not reducer.watch.has_local_gradients:
            return
        reducer.watch.has_local_gradients = False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(_LOCAL_GRADIENTS, stacklevel=stacklevel_of_user())

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
