"""Going on without a lost worker: what a trainer's collective calls do when one fails because a worker has ended.

    call fails            put back what the step has changed (`StepEngine`)
    wait                  for the launcher's decision: who is left
    meet                  leave the old group, make the new one
    compare               how many calls each worker's trainers have completed, and how many steps they have taken
    catch up              a worker behind takes the state of one that is ahead; or those ahead repeat, with the ones
                          behind, the call that they have completed
    repeat                the call that has failed, with the shards of the lost worker divided among the others

[Note: one call apart] Every call here ends with an exchange without which no worker completes the next one. So two
workers are at most one call apart, and a worker that is ahead has completed exactly the call that the others are in.
After a step, `[Note: the commit point]`, its state is the state that the others need. Evaluating and saving change no
state, so they can be repeated.
"""

import io
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import World
from lockstep.comm.generations import Generations, NextGeneration, current_generations
from lockstep.engine.continued import Continued
from lockstep.engine.run_state import RunState
from lockstep.errors import GroupError, PeerLostError
from lockstep.shards import even_ranges

if TYPE_CHECKING:
    from lockstep.engine.step_result import StepResult

Result = TypeVar("Result")

_LOGGER = logging.getLogger("lockstep")


@dataclass(slots=True)
class _LastCall:
    """The last call that a trainer has completed."""

    repeat: Callable[[], object] | None = None
    """Does it once more, for workers that are behind; None for a step."""
    result: "StepResult | None" = None
    """What a step has returned."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far one trainer of one worker is."""

    calls: int
    steps: int
    is_usable: bool


@final
class Recovery:
    """Lets the collective calls of one trainer continue without a worker that is lost.

    Args:
        state: The state of the run.
        move: Continues with other workers (collective): `Trainer.move_to`.
        continues: Whether the trainer is to continue; if not, a loss is an error of the call.
        min_workers: With fewer workers the launcher ends the run.

    Attributes:
        has_moved: Whether the workers are others than those that the trainer was made with.
        on_continued: Called on every worker that continues; by default rank 0 logs who was lost.
        generations: Where the launcher's decisions arrive; None where a loss is an error.
    """

    def __init__(
        self, state: RunState, move: Callable[[World], None], *, continues: bool, min_workers: int = 1
    ) -> None:
        self._state = state
        self._move = weakref.WeakMethod(move)
        self._num_calls = 0
        self._last = _LastCall()
        self._was_sent: StepResult | None = None
        self.has_moved = False
        self.on_continued: Callable[[Continued, World], None] = _log
        # With NCCL, a group of which a rank is lost can only be aborted, and that was never tried.
        self.generations = current_generations() if continues and state.device.type == "cpu" else None
        if self.generations is not None:
            _TRAINERS.add(self)
            self.generations.help_others = help_others
            self.generations.report_ready(max_workers=state.num_shards, min_workers=min_workers)

    def step(self, call: "Callable[[], StepResult]") -> "StepResult":
        """Make a call that takes a step."""
        result: StepResult = self._run(call, is_step=True)
        self._last = _LastCall(result=result)
        return result

    def repeatable(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes no state, or that may be made again."""
        result: Result = self._run(call, is_step=False)
        self._last = _LastCall(repeat=call)
        return result

    def _run(self, call: Callable[[], Any], *, is_step: bool) -> Any:
        if self.generations is None:
            return call()
        _TRAINERS.used_last = self
        while True:
            try:
                result = call()
            except GroupError as error:
                if not isinstance(error, PeerLostError) and not self.generations.has_next:
                    raise
                self._continue(self.generations, error, is_step=is_step)
                if self._was_sent is not None:
                    result, self._was_sent = self._was_sent, None
                else:
                    continue
            self._num_calls += 1
            return result

    def _continue(self, generations: Generations, error: GroupError, *, is_step: bool) -> None:
        """Continue with the workers that are left (collective), however many times one is lost meanwhile."""
        started = time.monotonic()
        world, joined = meet_next(generations, error)
        continued = Continued(
            generation=joined.number,
            lost=joined.lost,
            world_size=world.world_size,
            shards=even_ranges(world.world_size, self._state.num_shards),
            cursor=self._state.cursor,
            repeats_step=is_step and self._was_sent is None,
            seconds=time.monotonic() - started,
        )
        self.on_continued(continued, world)

    # -- Collective for the workers of a new generation ----------------------------------------------------------------

    @property
    def progress(self) -> _Progress:
        """How far this trainer is."""
        return _Progress(self._num_calls, self._state.global_step, self._state.is_usable)

    def rejoin(self, world: World, found: Sequence[_Progress]) -> None:
        """Continue with these workers, which have come so far (collective)."""
        if not all(each.is_usable for each in found):
            raise GroupError("The state of a trainer is not usable on every worker. Load a checkpoint.")
        self._state.forget_failed_step()
        most_calls, most_steps = max(each.calls for each in found), max(each.steps for each in found)
        if any(each.steps < most_steps for each in found):
            source = next(rank for rank, each in enumerate(found) if each.steps == most_steps)
            self._send_state(world, source, is_behind=found[world.rank].steps < most_steps)
        move = self._move()
        if move is None:
            return
        move(world)
        self.has_moved = True
        is_behind = [each.calls < most_calls and each.steps == most_steps for each in found]
        if any(is_behind) and not is_behind[world.rank] and self._last.repeat is not None:
            self._last.repeat()  # those behind are in this call

    def _send_state(self, world: World, source: int, *, is_behind: bool) -> None:
        """Give workers that have not taken the last step the state after it (collective)."""
        packed = torch.empty(0, dtype=torch.uint8)
        if world.rank == source:
            stream = io.BytesIO()
            torch.save({"state": self._state.to_dict(), "buffers": dict(self._state.model.named_buffers())}, stream)
            packed = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        size = torch.tensor([packed.numel()])
        dist.broadcast(size, source, group=world.group)
        if world.rank != source:
            packed = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(packed, source, group=world.group)
        results = world.gather_objects(self._last.result if world.rank == source else None)
        if is_behind:
            found = torch.load(
                io.BytesIO(packed.numpy().tobytes()), map_location=self._state.device, weights_only=False
            )
            self._load(found["state"], found["buffers"])
            self._was_sent = results[source]
            self._last = _LastCall(result=results[source])  # this worker may have to send it, if another one is lost

    @torch.no_grad()
    def _load(self, state: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        with self._state.restored_from(state):
            for name, buffer in self._state.model.named_buffers():
                buffer.copy_(buffers[name])  # those that are not persistent too


@final
class _Trainers:
    """The trainers of this process that continue without lost workers, in the order in which they were made.

    They are made in the same order on every worker. The one that was used last is held: the others may need its state
    when the function that has made it is over.
    """

    def __init__(self) -> None:
        self.used_last: Recovery | None = None
        self._numbers = itertools.count()
        self._all: weakref.WeakValueDictionary[int, Recovery] = weakref.WeakValueDictionary()

    def add(self, recovery: Recovery) -> None:
        self._all[next(self._numbers)] = recovery

    def living(self) -> dict[int, Recovery]:
        return dict(sorted(self._all.items()))


_TRAINERS: Final = _Trainers()


def meet_next(generations: Generations, error: GroupError) -> tuple[World, NextGeneration]:
    """Join the next generation with all trainers of this process (collective).

    Args:
        generations: The generations of the run.
        error: How a call has failed.

    Raises:
        GroupError: The run cannot continue.
    """
    while True:
        generations.wait_for_next(error)
        try:
            world, joined = generations.join_next()
            trainers = _TRAINERS.living()
            everywhere = world.gather_objects({number: each.progress for number, each in trainers.items()})
            for number, trainer in trainers.items():
                if all(number in each for each in everywhere):
                    trainer.rejoin(world, [each[number] for each in everywhere])
        except GroupError as again:  # a worker was lost meanwhile
            error = again
        else:
            return world, joined


def help_others() -> None:
    """Join the next generation for the sake of the others: this worker makes no calls any more (collective)."""
    generations = current_generations()
    if generations is not None and generations.has_next:
        meet_next(generations, GroupError("A worker was lost."))


def _log(continued: Continued, world: World) -> None:
    if world.rank == 0:
        _LOGGER.warning("%s", continued)
