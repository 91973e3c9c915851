"""What lets the collective calls of one trainer continue with other workers; `lockstep.engine.member` says how."""

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, final

from lockstep.comm import World
from lockstep.comm.generations import Generations, NextGeneration, current_generations
from lockstep.engine.continued import Continued
from lockstep.engine.member import Member
from lockstep.engine.run_state import RunState
from lockstep.engine.state_parts import Stateful
from lockstep.engine.step_table import StepAgreement
from lockstep.errors import GroupError
from lockstep.shards import even_ranges

if TYPE_CHECKING:
    from lockstep.engine.step_engine import StepEngine
    from lockstep.engine.step_result import StepResult

Result = TypeVar("Result")

_LOGGER = logging.getLogger("lockstep")


@final
class Recovery:
    """Lets the collective calls of one trainer continue with other workers.

    `continue_with` (local) is held weakly. `member` is None where the loss of a worker is an error of the call.
    """

    def __init__(
        self, state: RunState, continue_with: Callable[[World], None], *, continues: bool, min_workers: int = 1
    ) -> None:
        self._state = state
        self._continue_with = weakref.WeakMethod(continue_with)
        self._is_in_step = False
        self.has_moved = False
        self.on_continued: Callable[[Continued, World], None] = _log
        generations = current_generations() if continues else None
        self.member = None if generations is None else _member_of(generations)
        if self.member is not None:
            self.member.add(self)
            self.member.generations.report_ready(max_workers=state.num_shards, min_workers=min_workers)

    @property
    def planned_number(self) -> int:
        """The number of the generation that is planned after the next step; 0 for none.

        Of several trainers in a loop the first to step decides: a new worker begins with it.
        """
        return self.member.generations.planned_number if self.member is not None and self.member.leads(self) else 0

    def step(self, call: "Callable[[], StepResult]", engine: "Callable[[], StepEngine]") -> "StepResult":
        """Make a call that takes a step (collective)."""
        member = self.member
        if member is None:
            return call()
        # Not after the step before: what the loop does between two steps, new workers do not do.
        agreement = engine().agreement
        planned = 0 if agreement is None else max(status.planned for status in agreement.sums.statuses)
        member.begin_step(planned, engine().world)
        self._is_in_step = True
        try:
            return member.call(self, call, lambda: engine().agreement)
        finally:
            self._is_in_step = False

    def repeatable(self, call: Callable[[], Result], world: Callable[[], World]) -> Result:
        """Make a call that changes no state, or that may be made again (collective)."""
        member = self.member
        if member is None:
            return call()
        return member.call(self, lambda: member.confirmed(call, world), _no_agreement)

    def ask_others(self, error: GroupError) -> StepAgreement:
        """Return what a step has exchanged, if that failed here and another worker has it; else raise (collective)."""
        if self.member is None:
            raise error
        agreement = self.member.ask_others(error).agreement
        if agreement is None:
            raise error
        return agreement

    def leave_run(self, *, is_in_run: bool) -> None:
        """Note whether the trainer has the workers of the run, or was given others: then a loss is an error (local)."""
        if not is_in_run:
            self.member = None

    def on_new_world(self, callback: Callable[[World], object], world: Callable[[], World]) -> None:
        """Call `callback` with the present workers, and again whenever there are others (collective)."""
        member = self.member
        if member is None:
            callback(world())
            return

        def add() -> None:  # before the call ends: then there may be other workers at once
            member.on_new_world(callback)

        member.call(self, lambda: member.confirmed(lambda: callback(world()), world), add)

    def join(self, loop: Stateful | None, before_leaving: Callable[[], object] | None) -> bool:
        """Join the others if this worker is new (collective); return whether it is. See `Trainer.join`."""
        self._state.worker.loop = loop
        if self.member is None:
            return False
        if before_leaving is not None:
            self.member.before_leaving = before_leaving
        if not self.member.generations.is_joiner:
            return False
        self.member.join()
        return True

    # -- Called by `Member` --------------------------------------------------------------------------------------------

    def adopt(self, world: World, *, is_repeated: bool) -> None:
        """Continue with these workers (local)."""
        continue_with = self._continue_with()
        if continue_with is not None and self.member is not None:
            if is_repeated:
                self._state.forget_failed_step()
            continue_with(world)
            self.has_moved = True

    def state_for_new_worker(self) -> dict[str, Any]:
        """Return all that a new worker needs (local): the live tensors, and the generators as they are now."""
        return self._state.parts.save_for_worker()

    def take_state(self, found: dict[str, Any]) -> None:
        """Take what `state_for_new_worker` has returned on another worker (local)."""
        self._state.load_for_worker(found)

    def report_change(self, joined: NextGeneration, world: World, seconds: float, *, is_repeated: bool) -> None:
        self.on_continued(
            Continued(
                generation=joined.number,
                lost=joined.lost,
                arrived=joined.arrived,
                left=joined.leaving,
                world_size=world.world_size,
                shards=even_ranges(world.world_size, self._state.num_shards),
                cursor=self._state.cursor,
                repeats_step=is_repeated and self._is_in_step,
                seconds=seconds,
            ),
            world,
        )


def _member_of(generations: Generations) -> Member:
    if not isinstance(generations.member, Member):
        generations.member = member = Member(generations)
        generations.help_others = member.help_others
    return generations.member


def _no_agreement() -> None:
    """Return nothing: the call is no step."""


def _log(continued: Continued, world: World) -> None:
    if world.rank == 0:
        _LOGGER.warning("%s", continued)
