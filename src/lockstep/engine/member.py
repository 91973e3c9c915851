"""One worker's part in a run whose workers change: how many collective calls it has completed, and how it goes on.

    call fails            put back what it has changed (`StepEngine`), or keep it where another worker may have finished
    wait                  for the launcher's decision: who is left
    meet                  leave the old group, make the new one
    compare               how many calls each worker has completed
    finish                a worker behind learns how the call ended on one ahead, and ends it alike, from what it has
    adopt                 new engines of all trainers, with the shards of lost workers divided among the others
    repeat                the call, where no worker has completed it

[Note: one call apart] Every call here ends with an exchange without which no worker completes it: the step table, or
else an exchange of nothing. A worker takes part in it when it has all that it needs to end the call by itself. So two
workers are at most one call apart, whatever the trainers, and one that is behind lacks nothing but the knowledge that
the call is complete; after a step, the table. Neither state nor results are sent: the worker ahead may have run code of
the user's since, which has changed them.
"""

import dataclasses
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar, final

from lockstep import errors
from lockstep.channel.client import ChannelClosedError
from lockstep.comm import World, calls_for
from lockstep.comm.generations import Generations, NextGeneration
from lockstep.engine.step_table import StepAgreement
from lockstep.errors import (
    CheckpointError,
    GroupError,
    LockstepError,
    PeerFailedError,
    PeerLostError,
    chain_of,
)
from lockstep.sharding.transfer import receive_state, send_state

Result = TypeVar("Result")
_PURPOSE: Final = "comparing which calls the workers have completed"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    agreement: StepAgreement | None = None
    error: tuple[str, str] | None = None
    """Class and text of the error that it has raised; None for none."""

    def raise_error(self) -> None:
        if self.error is None:
            return
        name, text = self.error
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LockstepError) and not issubclass(kind, PeerLostError):
            raise kind(text)
        raise PeerFailedError(
            f"The call has failed on another rank, and was not completed here: {name}: {text} (LS213)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    calls: int
    has_state: bool
    is_between: bool
    trainers: tuple[int, ...]
    """Those that it has: they settle where all workers have them."""


class _Place(Enum):
    """Where a worker is among its calls; `Member` makes every transition.

    OUTSIDE -> IN_CALL -> ENDED -> OUTSIDE          a call, and what follows when it is complete
               IN_CALL -> MET -> IN_CALL            the last exchange has failed, and no worker has completed the call
    OUTSIDE -> BOUNDARY -> OUTSIDE                  other workers are met before a step, or to join or help them
    """

    OUTSIDE = auto()
    IN_CALL = auto()
    MET = auto()
    ENDED = auto()
    BOUNDARY = auto()


@final
class Member:
    def __init__(self, generations: Generations) -> None:
        self.generations = generations
        generations.num_calls = lambda: self._num_calls
        self.trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._num_trainers = 0
        self._num_calls = 0
        self._last = CallOutcome()
        self._place = _Place.OUTSIDE
        self._to_adopt: tuple[World, NextGeneration] | None = None
        self._to_settle: list[int] = []
        self._is_counted = False
        self._failed_at = 0.0
        self.callbacks: list[Callable[[World], object]] = []
        """Called whenever there are other workers, in this order."""
        self._caller: weakref.ref[Any] = weakref.ref(self)
        self._leader: weakref.ref[Any] | None = None
        self._epochs_without_leader: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.before_leaving: Callable[[], object] = lambda: None

    # -- Trainers ------------------------------------------------------------------------------------------------------

    def add(self, trainer: Any) -> None:
        """Note a trainer, which is held weakly (local; in the same order on every worker)."""
        self.trainers[self._num_trainers] = trainer
        self._num_trainers += 1

    def leads(self, trainer: Any) -> bool:
        """Return whether a trainer, which steps, is the one of whose steps the workers change before the next (local).

        It is the first that steps, with which the loop of a new worker begins too, until it is closed, or until another
        one has trained for an epoch without a step of it: the loop of trainers that take turns has come back by then.
        """
        leader, epoch = None if self._leader is None else self._leader(), trainer.epoch
        begun = self._epochs_without_leader.setdefault(trainer, epoch)
        if leader is None or leader.is_closed or epoch > begun:
            self._leader, leader = weakref.ref(trainer), trainer
        if leader is trainer:
            self._epochs_without_leader.clear()
        return leader is trainer

    # -- Calls ---------------------------------------------------------------------------------------------------------

    def call(self, trainer: Any, body: Callable[[], Result], finish: Callable[[], StepAgreement | None]) -> Result:
        """Make a call of a trainer (collective); however often a worker is lost meanwhile, it is completed once.

        `body` may run again as long as no worker has completed the call. `finish` is called when the call is complete,
        before other workers are adopted, and returns what was exchanged in a step.
        """
        if self._is_in_call:
            return body()  # a part of the call that it is made in
        self._place, self._caller = _Place.IN_CALL, weakref.ref(trainer)
        try:
            return self._complete(body, finish)
        finally:
            self._place = _Place.OUTSIDE

    @property
    def _is_in_call(self) -> bool:
        return self._place in {_Place.IN_CALL, _Place.MET, _Place.ENDED}

    def confirmed(self, body: Callable[[], Result], world: Callable[[], World]) -> Result:
        """Let no worker complete a call before all can (collective). [Note: one call apart]."""
        result = body()
        if self._is_in_call:
            try:
                world().gather_objects(None)
            except GroupError as error:
                self.ask_others(error)
        return result

    def ask_others(self, error: GroupError) -> CallOutcome:
        """Return how the call ended elsewhere, when its last exchange failed; raise `error` if nowhere (collective)."""
        if not self._is_in_call or not self._is_loss(error):
            raise error
        outcome = self._meet_others(error)
        if outcome is None:
            if self._place is _Place.IN_CALL:
                self._place = _Place.MET
            raise error
        outcome.raise_error()
        return outcome

    def complete(self, error: GroupError, agreement: StepAgreement | None) -> None:
        """Meet others and settle, where the present call is complete, but for parameters of others (collective).

        [Note: an update in parts] in `lockstep.engine.sharing`.
        """
        if self._to_adopt is None and not self._is_loss(error):
            raise error
        self._num_calls += 1
        self._last, self._is_counted = CallOutcome(agreement=agreement), True
        if self._to_adopt is None:
            self._meet_others(error)
        self._settle()

    def _complete(self, body: Callable[[], Result], finish: Callable[[], StepAgreement | None]) -> Result:
        while True:
            try:
                try:
                    result = body()
                except GroupError as error:
                    if self._place is not _Place.MET:
                        if not self._is_loss(error):
                            raise
                        outcome = self._meet_others(error)
                        if outcome is not None:  # an error: a worker that lacks more than the last exchange has one too
                            outcome.raise_error()
                            raise
                    for each in chain_of(error):  # its frames hold an engine and a group that are not used any more
                        traceback.clear_frames(each.__traceback__)
                        each.__traceback__ = None
                    self._place = _Place.IN_CALL
                    self._adopt(is_repeated=True)
                    continue
            except BaseException as error:
                self._end(CallOutcome(error=(type(error).__name__, str(error))))
                raise
            self._end(CallOutcome(agreement=finish()))
            return result

    def _end(self, outcome: CallOutcome) -> None:
        self._num_calls += not self._is_counted
        self._last, self._is_counted = outcome, False
        self._place = _Place.ENDED
        self._adopt(is_repeated=False)

    def _is_loss(self, error: GroupError) -> bool:
        return isinstance(error, PeerLostError) or self.generations.has_next

    # -- Other workers -------------------------------------------------------------------------------------------------

    def begin_step(self, number: int, world: World) -> None:
        """Continue with other workers before a step, if that is planned or if one is lost (collective).

        `number` is the generation that all workers have known of in the step before; 0 for none. A worker that leaves
        raises SystemExit.
        """
        is_planned = number > self.generations.number  # else a worker was lost, so it was given up
        if self._is_in_call or not (is_planned or self.generations.has_next):
            return
        self._place, self._failed_at = _Place.BOUNDARY, time.monotonic()
        try:
            if self.generations.has_next:
                self._meet_others(GroupError("A worker was lost. (LS602)"))
            else:
                self._meet_planned(number, world)
            self._adopt(is_repeated=False)
        finally:
            self._place = _Place.OUTSIDE

    def _meet_planned(self, number: int, world: World) -> None:
        try:
            if not self.generations.meet_at_boundary(number, world.world_size, partial(self._before_change, world)):
                self.generations.has_left = True
                raise SystemExit(0)
            self._meet()
        except GroupError as error:
            self._meet_others(error)

    def _before_change(self, world: World, planned: NextGeneration) -> None:
        """Let those that stay have what those that leave hold (collective), and let these finish what they do."""
        leaving = {each.rank for each in planned.leaving}
        for trainer in self.trainers.values() if leaving else ():
            trainer.settle(world, [rank for rank in range(world.world_size) if rank not in leaving])
        if planned.rank is None:
            self.before_leaving()

    def join(self) -> None:
        """Join the others, as a new worker (collective); SystemExit if the run has ended or needs no more workers."""
        self._failed_at = time.monotonic()
        self._place = _Place.BOUNDARY
        while self.generations.is_joiner:
            if not self.generations.wait_to_join():
                self.generations.has_left = True
                raise SystemExit(0)
            try:
                self._meet()
            except GroupError:  # a worker was lost meanwhile: the launcher sends another generation later
                continue
            self.generations.become_member()
        self._place = _Place.OUTSIDE
        self._adopt(is_repeated=False)

    def help_others(self) -> None:
        """Join the next generation for the sake of the others: this worker makes no calls any more (collective)."""
        if not self.generations.has_next:
            return
        self._place = _Place.BOUNDARY
        with suppress(GroupError):  # one more is lost, and there will be another generation
            self._meet()
            self._adopt(is_repeated=False)

    def _meet_others(self, error: GroupError) -> CallOutcome | None:
        """Meet the workers that are left, however many times one more is lost (collective); see `_meet`."""
        self._failed_at = self._failed_at or time.monotonic()
        cause: GroupError = error
        while True:
            self.generations.wait_for_next(cause)
            try:
                return self._meet()
            except GroupError as again:  # a worker was lost meanwhile
                cause = again

    def _meet(self) -> CallOutcome | None:
        """Meet the workers of the next generation (collective); return how the present call ended elsewhere, if so."""
        world, joined = self.generations.join_next()
        self._to_adopt = world, joined
        is_between = self._place in {_Place.ENDED, _Place.BOUNDARY}
        mine = _Standing(
            calls=self._num_calls,
            has_state=not self.generations.is_joiner,
            is_between=is_between,
            trainers=tuple(self.trainers),
        )
        with calls_for(_PURPOSE):
            found: list[_Standing] = world.gather_objects(mine)
            old = [rank for rank, each in enumerate(found) if each.has_state]
            if not old:
                raise GroupError(
                    "No worker is left that has the state of the run. Resume it from a checkpoint. (LS602)"
                )
            most = max(found[rank].calls for rank in old)
            if any(found[rank].calls < most - 1 for rank in old):
                raise GroupError(
                    f"The workers have completed different numbers of a trainer's calls: "
                    f"{', '.join(str(found[rank].calls) for rank in old)}. Make the same calls on every rank. (LS602)"
                )
            ahead = [rank for rank in old if found[rank].calls == most]
            outcome: CallOutcome | None = None
            if len(ahead) < len(old):
                sent = world.gather_objects(self._last if world.rank == ahead[0] else None)[ahead[0]]
                outcome = sent if world.rank in old and world.rank not in ahead else None
        self._to_settle = [number for number in mine.trainers if all(number in each.trainers for each in found)]
        if len(old) < world.world_size:
            self._hand_over(world, old, min(ahead, key=lambda rank: (not found[rank].is_between, rank)))
            self._num_calls = most if world.rank not in old else self._num_calls
        return outcome

    def _hand_over(self, world: World, old: list[int], source: int) -> None:
        trainers = dict(self.trainers)
        if world.rank == source:
            states = {number: each.state_for_new_worker() for number, each in trainers.items()}
            send_state(world, states, [rank for rank in range(world.world_size) if rank not in old])
        elif world.rank not in old:
            states = receive_state(world, source, {number: each.own_places() for number, each in trainers.items()})
            for number, each in trainers.items():
                if number not in states:
                    raise CheckpointError(  # no GroupError, after which `join` waits for another generation
                        "A new worker has made a trainer that the others do not have, or not any more. (LS602)"
                    )
                each.take_state(states[number])
            if len(states) > len(trainers):  # it would be made among calls of the others that are steps
                raise CheckpointError(
                    "The others have a trainer that this new worker has not made. Make all trainers before the first "
                    "trainer.join(). (LS602)"
                )

    def _settle(self) -> None:
        """Share the states of optimizers among the workers that were met, once for each set of them (collective)."""
        while self._to_settle:
            assert self._to_adopt is not None
            world, trainers = self._to_adopt[0], dict(self.trainers)
            try:
                for number in self._to_settle:
                    if number in trainers:
                        trainers[number].settle(world)
                self._to_settle = []
            except GroupError as error:
                if not self._is_loss(error):
                    raise
                self._meet_others(error)

    def _adopt(self, *, is_repeated: bool) -> None:
        """Continue with the workers that were met, if there are others than before (local, but for callbacks)."""
        while self._to_adopt is not None:
            self._settle()
            (world, joined), self._to_adopt = self._to_adopt, None
            trainers = dict(self.trainers)
            for trainer in trainers.values():
                trainer.adopt(world, is_repeated=is_repeated)
            try:
                for callback in self.callbacks:
                    callback(world)
            except GroupError as error:
                if not self._is_loss(error):
                    raise
                self._meet_others(error)
                continue
            with suppress(ChannelClosedError):  # the launcher has ended, so this worker will too
                self.generations.report("joined", generation=joined.number)
            lost, seconds = self.generations.take_losses(), time.monotonic() - self._failed_at
            self._failed_at = 0.0
            caller = self._caller() if self._is_in_call else next(iter(trainers.values()), None)
            change = dataclasses.replace(joined, lost=lost)
            for trainer in trainers.values():
                is_caller = trainer is caller
                trainer.report_change(change, world, seconds, is_repeated=is_repeated, is_caller=is_caller)
