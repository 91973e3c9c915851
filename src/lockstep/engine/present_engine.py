"""The engine of the present workers: made anew when they are others, while the state of the run stays."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

from torch import nn

from lockstep.comm import World, current_world
from lockstep.comm.generations import current_generations
from lockstep.data import ShardedBatch
from lockstep.engine.arguments import TrainerArguments, check_arguments
from lockstep.engine.recovery import Recovery
from lockstep.engine.run_state import RunState
from lockstep.engine.step_engine import StepEngine
from lockstep.engine.step_phase import StepPhase
from lockstep.engine.step_result import StepResult
from lockstep.reduce.model import Description

Result = TypeVar("Result")


@final
class PresentEngine:
    """Makes the collective calls of a trainer, with the workers that there are.

    Constructing is collective, as that of a `StepEngine`. `on_step` is called with each result, as a part of the step.
    """

    def __init__(
        self,
        state: RunState,
        arguments: TrainerArguments,
        world: World,
        descriptions: Sequence[Description],
    ) -> None:
        self._state = state
        self._arguments = arguments
        continues = arguments.on_worker_loss == "continue" and world == current_world()
        state.waits_for_device = continues and current_generations() is not None
        self.engine = StepEngine(state, arguments, world, descriptions)
        self.recovery = Recovery(
            state, self._continue_with, continues=continues, min_workers=int(arguments.min_workers)
        )
        # A callback that looks at a step must not look at one that is undone when its loss is read.
        state.may_be_unread = not state.callbacks.of("on_step")
        self.engine.ask_others = self.recovery.ask_others
        self.on_step: Callable[[StepResult], None] | None = None
        self._is_in_callback = False
        self._trained = _trained_parameters(state.model)

    @property
    def world(self) -> World:
        return self.engine.world

    def step(self, batch: ShardedBatch) -> StepResult:
        """Take a step (collective); `Trainer.step` says what it raises."""
        self._check_not_in_callback()
        return self.recovery.step(partial(self._step, batch), lambda: self.engine)

    def _step(self, batch: ShardedBatch) -> StepResult:
        # The engine refuses what is no batch, on every worker.
        if isinstance(batch, ShardedBatch) and self.recovery.has_moved and batch.world != self.world:
            batch = batch.for_present_workers()
        self.engine.planned = self.recovery.planned_number
        result = self.engine.step(batch)
        if self.on_step is not None:
            self._is_in_callback = True
            try:
                self.on_step(result)
            finally:
                self._is_in_callback = False
        return result

    def repeatable(self, call: Callable[[World], Result]) -> Result:
        """Make a call that changes no state, or that may be made again (collective)."""
        self._check_not_in_callback()
        return self.recovery.repeatable(lambda: call(self.world), lambda: self.world)

    def has_other_parameters(self) -> bool:
        """Whether parameters were frozen or unfrozen since the engine was made (local)."""
        return self._trained != _trained_parameters(self._state.model)

    def remake(self) -> None:
        """Make the engine anew, for parameters that were frozen or unfrozen (collective)."""
        self._state.check_last_step()

        def make(world: World) -> None:
            self.engine.close()
            self._replace_engine(world, check_arguments(self._arguments, world))

        self.repeatable(make)

    def remake_alone(self) -> None:
        """Make the engine anew, if parameters were frozen or unfrozen, as the others have done before (local)."""
        if self.has_other_parameters():
            self._replace_engine(self.world, None)

    def move_to(self, world: World) -> None:
        """Continue with other workers (collective for these); `Trainer.move_to` says what it raises."""
        self._check_not_in_callback()
        state = self._state
        state.check_last_step()
        self.engine.close()
        progress = {"place in the data": str(state.cursor), "steps taken": str(state.global_step)}
        self._replace_engine(world, check_arguments(self._arguments, world, progress))
        self.recovery.leave_run(is_in_run=world == current_world())

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
        self.engine.ask_others = self.recovery.ask_others
        self._trained = _trained_parameters(self._state.model)

    def _check_not_in_callback(self) -> None:
        if self._is_in_callback:
            raise ValueError(
                "A callback has made a collective call of the trainer (step, evaluate, save, load or the like) in "
                "on_step, which is a part of a step. Make it in on_epoch, or in the loop after trainer.step. (LS525)"
            )


def _trained_parameters(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]
