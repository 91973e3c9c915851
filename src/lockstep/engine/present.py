"""The engine of the present workers, what lets the calls of a trainer continue with others, and calling its callbacks.

The engine is made anew when the workers are others, while the state of the run stays. `lockstep.engine.member` says how
workers find each other and agree on which calls are complete.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import nn

from lockstep.comm import World, current_world
from lockstep.comm.generations import ChangedWorker, Generations, LostWorker, NextGeneration, current_generations
from lockstep.data import Cursor, ShardedBatch
from lockstep.engine.arguments import TrainerArguments, check_arguments
from lockstep.engine.batches import gather_results
from lockstep.engine.evaluation import read_values
from lockstep.engine.member import Member
from lockstep.engine.optimizers import separate_optimizers
from lockstep.engine.run_state import RunState
from lockstep.engine.sharing import OptimizerSharing
from lockstep.engine.state_parts import Stateful
from lockstep.engine.step_engine import StepEngine
from lockstep.engine.step_table import StepResult
from lockstep.errors import counted
from lockstep.events import StepAudited
from lockstep.recording.file_format import StepPhase
from lockstep.reduce.model import Description
from lockstep.shards import even_ranges

Result = TypeVar("Result")

_LOGGER = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """How a trainer continues with other workers."""

    generation: int
    lost: tuple[LostWorker, ...]
    arrived: tuple[ChangedWorker, ...] = ()
    left: tuple[ChangedWorker, ...] = ()
    """Who has left, as it was asked to."""
    world_size: int
    shards: tuple[range, ...]
    """Which shards each of them runs, in rank order."""
    cursor: Cursor
    repeats_step: bool
    """Whether the step at `cursor` had begun; else it was an evaluation, a save or another call."""
    seconds: float
    """From the error of the call to the moment at which it could be made again."""

    def __str__(self) -> str:
        changes = [f"rank {each.rank} (pid {each.pid}) {each.reason}" for each in self.lost]
        changes += [f"rank {each.rank} (pid {each.pid}) left" for each in self.left]
        changes += [f"rank {each.rank} (pid {each.pid}) joined" for each in self.arrived]
        lost = "; ".join(changes) or "The workers are others"
        count = f"{counted(self.world_size, 'worker')} continue{'s' if self.world_size == 1 else ''}"
        place = f"epoch {self.cursor.epoch + 1}, step {self.cursor.step + 1}"
        how = f"with {place}, which is repeated" if self.repeats_step else f"before {place}"
        who = ", ".join(f"rank {rank}: {_name_range(shards)}" for rank, shards in enumerate(self.shards))
        return (
            f"{lost[0].upper()}{lost[1:]}. {count} {how}, after {self.seconds:.2f} s. Shards: {who}. No sample is "
            "lost, and no bit of the result changes. (LS604)"
        )


@final
class PresentEngine:
    """Constructing is collective; `member` is None where the loss of a worker is an error of the call."""

    def __init__(
        self,
        trainer: Any,
        state: RunState,
        arguments: TrainerArguments,
        world: World,
        descriptions: Sequence[Description],
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self._state = state
        self._arguments = arguments
        continues = arguments.on_worker_loss == "continue" and world == current_world()
        generations = current_generations() if continues else None
        state.waits_for_device = generations is not None
        self.on_continued: Callable[[Continued, World], None] = _log
        """Called in the call that continues with other workers, on each of them; it may make no collective calls."""
        self._is_in_callback = False
        self._is_in_step = False
        self._has_moved = False
        self._has_taken_state = False
        self._trained = _trained_parameters(state.model)
        if arguments.shard_optimizer:  # where a lost worker is an error, nobody needs its pieces
            neighbours = 0 if generations is None else int(arguments.neighbours)
            if generations is not None and not neighbours and world.rank == 0:
                _LOGGER.warning(
                    "neighbours is 0: each part of the optimizer's state is on one worker alone, so a lost worker ends "
                    "the run, which is resumed from its newest checkpoint. (LS602)"
                )
            state.sharing.begin(separate_optimizers(state.optimizer), world, neighbours)
        self.member = None if generations is None else _member_of(generations)
        self.engine = self._make_engine(world, descriptions)
        self.moments = Moments(trainer, state, self)
        if self.member is not None:
            self.member.add(self)
            self.member.generations.report_ready(max_workers=state.num_shards, min_workers=int(arguments.min_workers))

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def can_continue(self) -> bool:
        return self.member is not None

    @property
    def epoch(self) -> int:
        return self._state.cursor.epoch

    @property
    def is_closed(self) -> bool:
        return self.engine.phase is StepPhase.CLOSED

    # -- Calls ---------------------------------------------------------------------------------------------------------

    def step(self, batch: ShardedBatch) -> StepResult:
        """Take a step (collective); `Trainer.step` says what it raises."""
        self._check_not_in_callback()
        member = self.member
        if member is None:
            return self._step(batch)
        # Not after the step before: what the loop does between two steps, new workers do not do.
        agreement = self.engine.table.agreement
        member.begin_step(0 if agreement is None else agreement.planned, self.world)
        self._is_in_step = True
        try:
            return member.call(self, partial(self._step, batch), lambda: self.engine.table.agreement)
        finally:
            self._is_in_step = False

    def _step(self, batch: ShardedBatch) -> StepResult:
        # The engine refuses what is no batch, on every worker.
        if isinstance(batch, ShardedBatch) and self._has_moved and batch.world != self.world:
            batch = batch.for_present_workers()
        self.engine.requests.planned = self._planned_number()
        result = self.engine.step(batch)
        self._complete_parameters()
        if self._state.callbacks.of("on_step"):
            self._is_in_callback = True
            try:
                self._state.callbacks.call("on_step", self._trainer(), result)
            finally:
                self._is_in_callback = False
        return result

    def _complete_parameters(self) -> None:
        """[Note: an update in parts] in `lockstep.engine.sharing` (collective where a worker was lost)."""
        lost = self._state.sharing.take_loss()
        if lost is None:
            return
        missing = "Parameters that other workers had updated are missing."
        if self.member is None:
            self._state.mark_unusable(missing)
            raise lost
        try:
            self.member.complete(lost, self.engine.table.agreement)
        except BaseException:
            self._state.mark_unusable(missing)
            raise

    def _planned_number(self) -> int:
        """Return the planned generation, or 0 for a trainer before whose steps the workers do not change."""
        return self.member.generations.planned_number if self.member is not None and self.member.leads(self) else 0

    def audited(self) -> list[StepAudited]:
        """Take what is known of the bits of the updates since the last call; the first call begins it (local)."""
        found, self._state.audited = self._state.audited, []
        return found or []

    def repeatable(self, call: Callable[[World], Result]) -> Result:
        """Make a call that changes no state, or that may be made again (collective)."""
        self._check_not_in_callback()
        return self._repeat(call)

    def _repeat(self, call: Callable[[World], Result], finish: Callable[[], None] = lambda: None) -> Result:
        member = self.member
        if member is None:
            return call(self.world)
        return member.call(self, lambda: member.confirmed(lambda: call(self.world), lambda: self.world), finish)

    def on_new_world(self, callback: Callable[[World], object]) -> None:
        """Call `callback` with the present workers, and again whenever there are others (collective)."""
        member = self.member
        # It is added before the call ends: then there may be other workers at once.
        self._repeat(callback, lambda: None if member is None else member.callbacks.append(callback))

    def join(self, loop: Stateful | None, before_leaving: Callable[[], object] | None) -> bool:
        """Join the others if this worker is new (collective); return whether it is. See `Trainer.join`."""
        self._state.worker.use_loop(loop)
        if self.member is None:
            return False
        if before_leaving is not None:
            self.member.before_leaving = before_leaving
        if self.member.generations.is_joiner:
            _touch_memory(self._state.model)
            self.member.join()  # which takes the states of all trainers
        is_new, self._has_taken_state = self._has_taken_state, False
        return is_new

    # -- Engines -------------------------------------------------------------------------------------------------------

    def has_other_parameters(self) -> bool:
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

    def _make_engine(self, world: World, descriptions: Sequence[Description] | None) -> StepEngine:
        engine, member = StepEngine(self._state, self._arguments, world, descriptions), self.member
        if member is not None:
            engine.table.ask_others = lambda error: member.ask_others(error).agreement
        return engine

    def _replace_engine(self, world: World, descriptions: Sequence[Description] | None) -> None:
        if descriptions is not None:  # other parameters are trained, or by workers that the user has chosen
            self._state.forget_findings()
        before = self.engine
        before.close()
        self.engine = self._make_engine(world, descriptions)
        self.engine.requests.stop_requested = before.requests.stop_requested
        self.engine.table.agreement = before.table.agreement
        self._trained = _trained_parameters(self._state.model)

    def _check_not_in_callback(self) -> None:
        if self._is_in_callback:
            raise ValueError(
                "A callback has made a collective call of the trainer (step, evaluate, save, load or the like) in "
                "on_step, which is a part of a step. Make it in on_epoch, or in the loop after trainer.step. (LS525)"
            )

    # -- Called by `Member` --------------------------------------------------------------------------------------------

    def adopt(self, world: World, *, is_repeated: bool) -> None:
        """Continue with these workers, which are where this one is (local)."""
        if self.member is None:
            return
        if is_repeated:
            self._state.failed_here = ""  # no other worker has finished that step
        if self.is_closed:
            self.engine.world = world  # for what still works
        else:
            self._replace_engine(world, None)
        self._has_moved = True

    @property
    def sharing(self) -> OptimizerSharing:
        return self._state.sharing

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to resume (local; within `sharing.collected` where the optimizer is shared)."""
        return self._state.to_dict()

    def settle(self, world: World, staying: Sequence[int] | None = None) -> None:
        """Share the optimizer's state among these workers, or those of them that stay (collective)."""
        self._state.sharing.settle(world, staying)

    def state_for_new_worker(self) -> dict[str, Any]:
        """Return all that a new worker needs (local): the live tensors, and the generators as they are now."""
        return self._state.parts.save_for_worker()

    def load_networks(self, state: Mapping[str, Any]) -> None:
        """Take back the networks that the loss uses, for an evaluation of saved weights, which continues no run."""
        self._state.networks.check(state)
        self._state.networks.load(state)

    def own_places(self) -> dict[str, Any]:
        """Return what of `state_for_new_worker` may be overwritten here before it is loaded (local): it is copied."""
        return {"model": self._state.model.state_dict()}

    def take_state(self, found: dict[str, Any]) -> None:
        self._state.parts.load_for_worker(found)
        self._state.note_scheduler()
        self._has_taken_state = True

    def report_change(
        self, joined: NextGeneration, world: World, seconds: float, *, is_repeated: bool, is_caller: bool
    ) -> None:
        trainer = self._trainer()
        if not is_caller and (trainer is None or self.is_closed):
            return
        continued = Continued(
            generation=joined.number,
            lost=joined.lost,
            arrived=joined.arrived,
            left=joined.leaving,
            world_size=world.world_size,
            shards=even_ranges(world.world_size, self._state.num_shards),
            cursor=self._state.cursor,
            repeats_step=is_repeated and self._is_in_step,
            seconds=seconds,
        )
        if is_caller or self.on_continued is not _log:  # one trainer logs it
            self.on_continued(continued, world)
        self._state.callbacks.call("on_workers_changed", trainer, continued)


def _member_of(generations: Generations) -> Member:
    if not isinstance(generations.member, Member):
        generations.member = member = Member(generations)
        generations.help_others = member.help_others
    return generations.member


def _log(continued: Continued, world: World) -> None:
    if world.rank == 0:
        _LOGGER.warning("%s", continued)


def _touch_memory(model: nn.Module) -> None:
    """Get memory for gradients and an optimizer's state while the others do not wait (local).

    It is freed, and stays with the process: new memory takes longer to write to than a message takes.
    """
    held = [torch.zeros_like(each) for each in model.parameters() if each.is_cpu for _ in range(3)]
    held.clear()


def _trained_parameters(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def _name_range(shards: Sequence[int]) -> str:
    return f"{shards[0]}" if len(shards) == 1 else f"{shards[0]} to {shards[-1]}"


@final
class Moments:
    """Calls callbacks at named moments. [Note: callbacks and workers] in `lockstep.engine.callbacks`."""

    def __init__(self, trainer: Any, state: RunState, present: PresentEngine) -> None:
        self._trainer = weakref.ref(trainer)
        self._state = state
        self._present = present
        self.callbacks = state.callbacks
        self._has_ended = not self.callbacks
        self._evaluations: dict[str, float] | None = None
        self._under_way: set[str] = set()

    def start(self) -> None:
        """Call `on_start`, once (collective, but for a new worker where the others have made this call before)."""
        if self.callbacks.has_started:
            return
        self.callbacks.has_started = True
        self.callbacks.call("on_start", self._trainer())
        if self.callbacks.has_started_elsewhere:
            self.callbacks.has_started_elsewhere = False
            self._present.remake_alone()
        else:
            self._agree()

    def start_as_others(self) -> None:
        """Call `on_start` on a new worker, if the others have (local)."""
        if self.callbacks.has_started_elsewhere:
            self.start()

    def begin_again(self) -> None:
        """Let `on_start` be called again: a checkpoint was loaded (local)."""
        self.callbacks.has_started = self._has_ended = not self.callbacks
        self.callbacks.has_started_elsewhere = False

    def end_step(self, result: StepResult) -> None:
        """Call `on_epoch` if a step was the last one of its epoch, and let a callback's end come before a stop.

        (Collective.) No checkpoint holds that a callback has asked for the end in this step: a run that stops here
        would go on when it is resumed. So the request to stop waits for the next step, with which the training ends.
        """
        if self.callbacks and self._state.cursor.step == 0:
            self._state.check_last_step()  # a step that is undone ends no epoch
            self.callbacks.call("on_epoch", self._trainer(), result.cursor.epoch)
            self._agree()
        if result.should_stop and not self._state.is_ending and self.will_end():
            result.should_stop = False

    def look_at_evaluation(self, found: Any, name: str = "") -> None:
        if not self.callbacks:
            return
        prefix = f"{name}_" if name else ""
        values = {f"{prefix}{key}": value for key, value in read_values(found).items()}
        if self._evaluations is not None:
            self._evaluations.update(values)
            return
        self._look("on_evaluate", values)

    @contextmanager
    def no_evaluation(self) -> Iterator[None]:
        """Let callbacks not look at the evaluations in this context (local)."""
        self._evaluations = {}
        try:
            yield
        finally:
            self._evaluations = None

    @contextmanager
    def one_evaluation(self) -> Iterator[None]:
        """Let the evaluations in this context be one for the callbacks, called at its end (collective)."""
        if self._evaluations is not None:  # within `no_evaluation`
            yield
            return
        self._evaluations = {}
        try:
            yield
            values = self._evaluations
        finally:
            self._evaluations = None
        if values:
            self.look_at_evaluation(values)

    def will_end(self) -> bool:
        """Return whether a callback of any worker has let the next step be the last one (collective)."""
        if not self.callbacks:
            return False

        def requested(world: World) -> list[str]:
            mine = self._state.end_reason or self._state.end_reason_after_step
            return gather_results(world, lambda: mine, "agreeing on whether the next step is the last one")

        return any(self._present.repeatable(requested))

    def note_save(self, path: Any) -> None:
        if self.callbacks:
            self._look("on_save", path)

    def end(self) -> None:
        """Call `on_end`, once, if training had begun (local)."""
        if not self._has_ended and self.callbacks.has_started:
            self._has_ended = True
            self.callbacks.call("on_end", self._trainer())

    def _look(self, moment: str, value: Any) -> None:
        """Call those that look at a moment (collective); not for what one of them does in it, which would not end."""
        if moment in self._under_way:
            return
        self._under_way.add(moment)
        try:
            self.callbacks.call(moment, self._trainer(), value)
        finally:
            self._under_way.discard(moment)
        self._agree()

    def _agree(self) -> None:
        """Let all workers end, or train other parameters, if the callbacks of one have decided so (collective)."""

        def decided(world: World) -> list[tuple[str, bool]]:
            mine = self._state.end_reason, self._present.has_other_parameters()
            return gather_results(world, lambda: mine, "agreeing on what the callbacks have decided")

        found = self._present.repeatable(decided)
        self._state.end_reason = next((reason for reason, _ in found if reason), "")
        self._state.is_ending = self._state.is_ending or bool(self._state.end_reason)
        if any(is_changed for _, is_changed in found):
            self._present.remake()
