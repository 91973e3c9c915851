"""Which workers a run has now, as the launcher decides it: a worker's side.

A *generation* is one set of workers. When a worker has ended, the launcher sends those that are left the next
generation: their ranks, and who was lost. They leave the group of the last generation, and make one for the next.

    launcher                                    worker
    --------                                    ------
                                           <-   ready      it can continue without others
    a worker ends
    who is left, in `launch/membership.py` ->   generation
                                                leave the old group
                                           <-   meets      it waits for the others
                                                make the new group
                                           <-   has_state  a new worker need not be set aside any more
                                           <-   joined     it has the state of the run in the new generation
                                           <-   lost       a call has failed because a rank was lost
    nobody was lost                        ->   unchanged  the error stands
                                           <-   loading_lost   a process that loads its samples was killed
    to all: whether it is started again    ->   loading_lost
    workers arrive or leave                ->   generation, planned: the same between two steps
    one is lost before all have joined it  ->   generation, not planned; set_aside, to new workers: they wait again
    all have returned                      ->   over       nobody comes to a meeting any more

[Note: the boundary] All present workers leave their group before the same step. A worker that was told of the planned
generation says so in the step table, so all learn of it in the same step. When they begin the next one, they count
themselves in the launcher's store: when the count is complete, each has done what its loop does after the step before,
such as an evaluation or a save, and none needs the old group or one that leaves. A new worker begins with that step.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

from torch.distributed import PrefixStore

from lockstep.channel.client import Channel, ChannelClosedError
from lockstep.channel.table import Message
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.comm.bootstrap.process_group import destroy_process_group, init_process_group, make_next_group
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.world import World, current_world
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.forking import this_process

_DECISION_SECONDS = 60.0
"""How long the launcher may take to decide: until it has seen that a worker has ended, and killed one if need be."""
_BOUNDARY_TIMEOUT = timedelta(days=365)
"""What another worker does before it is there may take any time; the launcher ends the wait if one is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    rank: int
    """Its rank in the generation before."""
    pid: int
    reason: str
    """How it ended: "was killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedWorker:
    """A worker that arrives or leaves, as all were asked to expect."""

    rank: int
    """Its rank: in the new generation if it arrives, in the one before if it leaves."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLoadingProcess:
    """A process that has loaded samples for a worker, and was killed."""

    rank: int
    """The rank of the worker."""
    pid: int
    reason: str
    goes_on: bool
    """Whether the worker starts it anew; else the limit of the launch is used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    number: int
    rank: int | None
    """The rank of this worker; None for one that leaves."""
    world_size: int
    lost: tuple[LostWorker, ...] = ()
    """Who has ended since the generation before."""
    is_planned: bool = False
    """Whether the present workers make it between two steps; else at once, because one of them has ended."""
    arrived: tuple[ChangedWorker, ...] = ()
    """Who is new, and gets the state of the run from the others."""
    leaving: tuple[ChangedWorker, ...] = ()


@final
class Generations:
    """The generations of a run, as one of its workers follows them."""

    def __init__(self, descriptor: int, backend: str) -> None:
        self.number = 0
        self.is_joiner = False
        """Whether this worker is new in a run, and has not joined the others yet."""
        self.has_left = False
        self.help_others: Callable[[], None] | None = None
        """Called when there is a new generation, but this worker makes no calls any more."""
        self.on_joined: Callable[[NextGeneration], object] = lambda _joined: None
        self.on_ready: Callable[[], object] = lambda: None
        self.on_stay: Callable[[], object] = lambda: None
        """Called in the thread that reads the channel, when the launcher does not let this worker leave."""
        self.look_at_main_thread: Callable[[], dict[str, Any]] = lambda: {"waits": True, "place": ""}
        """Returns whether the main thread waits for others (`waits`), its line (`place`). Called in that thread too.

        Who waits is not ended as one that others wait for."""
        self.num_calls: Callable[[], int] = lambda: 0
        """Returns how many calls that all workers make alike are complete here. Called in that thread too."""
        self.member: object = None
        """What `lockstep.engine.member` keeps for this worker."""
        self._backend = backend
        self._changed = threading.Condition()
        self._next: NextGeneration | None = None
        self._planned: NextGeneration | None = None
        self._lost: list[LostWorker] = []
        self._lost_loading: list[LostLoadingProcess] = []
        self._answered: dict[int, bool] = {}
        self._unchanged = self._is_over = False
        self._is_set_aside = self._is_left_out = False
        self._stop_reason = ""
        self._channel = Channel(descriptor, self.handle)
        self._store = ChannelStore(self._channel)

    def make_first(self, rank: int, world_size: int, prefix: str = "") -> None:
        """Make the first group (collective); with a `prefix` for a new worker, whose first group is its own."""
        store = PrefixStore(prefix, self._store) if prefix else self._store
        init_process_group(self._backend, store=store, rank=rank, world_size=world_size)

    def handle(self, message: Message) -> None:
        """Take in an event of the launcher; called in the thread that reads the channel."""
        with self._changed:
            if message["event"] == "generation":
                self._note(_read(message))
            elif message["event"] == "loading_lost":
                lost = LostLoadingProcess(**message["process"])
                self._lost_loading.append(lost)
                self._answered[lost.pid] = lost.goes_on
            elif message["event"] == "unchanged":
                self._unchanged = True
            elif message["event"] == "stay":
                self.on_stay()
            elif message["event"] == "set_aside":
                self._set_aside()
            elif message["event"] == "ping":
                self.report("alive", number=message["number"], calls=self.num_calls(), **self.look_at_main_thread())
            elif message["event"] == "over":
                self._is_over = True
                self._give_up(GroupError("All workers have returned. (LS602)"))
            elif message["event"] == "stop":
                self._stop_reason = message["reason"] or "The run ends."
            self._changed.notify_all()

    def _note(self, decided: NextGeneration) -> None:
        if decided.is_planned and not self.is_joiner:
            self._planned = decided
            return
        self._next = decided
        self._planned = None
        self._lost += decided.lost
        self._give_up(_explain(decided.lost))

    def _give_up(self, error: GroupError) -> None:
        self._store.abandon()  # a group that is being made lacks a worker
        if not self.is_joiner:  # its first group is its own
            OPEN_GROUPS.end_calls(error)

    def _set_aside(self) -> None:
        """Let a new worker wait again, because another one was lost before all have joined; it gets the state anew."""
        if not self.is_joiner:  # it has joined, which the launcher did not know: there is no way back to the others
            self._is_left_out = True
            return
        self._next, self._is_set_aside = None, True
        self._store.abandon()

    def become_member(self) -> None:
        """Note that this new worker has the state of the run, unless it was set aside meanwhile (local)."""
        with self._changed:  # no generation comes between the two
            if not self._is_set_aside:
                with suppress(ChannelClosedError):  # the launcher has ended, so this worker will too
                    self.report("has_state", generation=self.number)
            self.is_joiner = self._is_set_aside

    def report(self, what: str, **fields: Any) -> None:
        """Report something to the launcher (local); ChannelClosedError if that has ended."""
        self._channel.report(what, **fields)

    def report_ready(self, *, max_workers: int, min_workers: int = 1) -> None:
        """Report to the launcher that this worker can continue without others, or with more (local)."""
        self.on_ready()
        OPEN_GROUPS.are_replaced = True
        self.report("ready", max_workers=max_workers, min_workers=min_workers)

    @property
    def has_next(self) -> bool:
        """Whether there is a generation that this worker has not joined, because one was lost."""
        return self._next is not None and not self._is_over

    @property
    def planned_number(self) -> int:
        """The number of the generation that is planned after the step under way; 0 for none."""
        planned = self._planned
        return 0 if planned is None else planned.number

    def take_losses(self) -> tuple[LostWorker, ...]:
        """Return who has ended since this was called last (local)."""
        with self._changed:
            lost, self._lost = tuple(self._lost), []
            return lost

    def take_lost_loading_processes(self) -> tuple[LostLoadingProcess, ...]:
        """Return which loading processes of any worker were killed since this was called last (local)."""
        with self._changed:
            lost, self._lost_loading = tuple(self._lost_loading), []
            return lost

    def may_load_again(self, pid: int, reason: str) -> bool:
        """Report a killed loading process of this worker; return whether the launch starts another one (local)."""
        deadline = time.monotonic() + _DECISION_SECONDS
        with self._changed:
            try:
                self.report("loading_lost", pid=pid, reason=reason)
            except ChannelClosedError:  # the launcher has ended, so this worker will too
                return False
            while pid not in self._answered:
                if self._stop_reason or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            return self._answered.pop(pid)

    def wait_for_next(self, error: BaseException) -> None:
        """Wait for the generation after one in which a call has failed; raise `error` if the launcher sees no loss."""
        deadline = time.monotonic() + _DECISION_SECONDS
        with self._changed:
            self._unchanged = False
            if self._next is None:
                try:
                    self.report("lost", generation=self.number)
                except ChannelClosedError:
                    raise error from None
            while self._next is None:
                if self._is_left_out:
                    self.has_left = True
                    raise SystemExit(0)
                if self._stop_reason:
                    raise GroupError(f"{error} {self._stop_reason}") from error
                if self._unchanged or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise error

    def wait_to_join(self) -> bool:
        """Let a new worker wait for its generation; return False if it is not needed (local)."""
        with self._changed:
            if self._next is None:
                self.report("waiting_to_join")
            while self._next is None and not self._stop_reason:
                self._changed.wait()
            return self._next is not None

    def meet_at_boundary(self, number: int, world_size: int, before_change: Callable[[NextGeneration], object]) -> bool:
        """Wait until all present workers are at the step before which a change is planned (collective).

        `before_change` is called on each of them before any goes on. Returns whether this worker stays. GroupError: a
        worker was lost before that, and the plan is given up.
        """
        deadline = time.monotonic() + _DECISION_SECONDS
        with self._changed:
            while self.planned_number < number and self._next is None:  # the others may have been told first
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise GroupError(
                        f"The launcher has not sent generation {number}, of which other workers know. (LS602)"
                    )
            planned = self._planned
        if planned is None:
            raise GroupError(f"Generation {number} was given up: a worker was lost. (LS602)")
        before_change(planned)
        key = f"boundary/{number}"
        try:
            if self._store.add(key, 1) == world_size:
                self._store.set(f"{key}/complete", "")
            self._store.wait([f"{key}/complete"], _BOUNDARY_TIMEOUT)
        except RuntimeError as error:
            raise GroupError(f"Generation {number} was given up: {error} (LS602)") from error
        return planned.rank is not None

    def join_next(self) -> tuple[World, NextGeneration]:
        """Leave the present group, make the next generation's (collective); GroupError if one is lost meanwhile."""
        joined = self._take_next()
        self.number = joined.number
        assert joined.rank is not None
        try:
            if self.is_joiner and joined.is_planned:  # the others may evaluate for long before they are there
                self._store.wait([f"boundary/{joined.number}/complete"], _BOUNDARY_TIMEOUT)
            destroy_process_group()
            with suppress(ChannelClosedError):  # the launcher has ended, so this worker will too
                self.report("meets", generation=joined.number)
            store = PrefixStore(f"generation/{joined.number}", self._store)
            make_next_group(self._backend, store, joined.rank, joined.world_size)
        except RuntimeError as error:
            if isinstance(error, GroupError) or not (self.has_next or self._is_set_aside or self._is_over):
                raise
            raise GroupError(f"The group of generation {joined.number} was given up: {error} (LS602)") from error
        self.on_joined(joined)
        return current_world(), joined

    def _take_next(self) -> NextGeneration:
        """Return the next generation, which is the present one from now on."""
        with self._changed:
            taken = self._planned if self._next is None else self._next
            self._next = self._planned = None
            self._is_set_aside = False  # it was from an earlier generation, which this worker may not even have seen
            if taken is None or self._is_over:
                raise GroupError("There is no next generation of workers. (LS602)")
            self._store.renew()
            OPEN_GROUPS.renew()
            return taken


def _read(message: Message) -> NextGeneration:
    return NextGeneration(
        number=message["number"],
        rank=message["rank"],
        world_size=message["world_size"],
        lost=tuple(LostWorker(**each) for each in message["lost"]),
        is_planned=message.get("planned", False),
        arrived=tuple(ChangedWorker(**each) for each in message.get("arrived", ())),
        leaving=tuple(ChangedWorker(**each) for each in message.get("leaving", ())),
    )


def _explain(lost: tuple[LostWorker, ...]) -> GroupError:
    if not lost:
        return GroupError("The launcher has replaced the workers of this group. (LS602)")
    named = "; ".join(f"Rank {each.rank} (process {each.pid}) is lost: it was {each.reason}" for each in lost)
    return PeerLostError(f"{named}. (LS602)", rank=lost[0].rank)


class _Present:
    generations: Generations | None = None
    process = 0


_PRESENT: Final = _Present()


def follow_generations(generations: Generations) -> None:
    _PRESENT.generations, _PRESENT.process = generations, this_process()


def current_generations() -> Generations | None:
    """Return the generations that this process follows (local).

    None if its launcher does not replace groups, and in a child that a worker has forked, which has no channel.
    """
    return _PRESENT.generations if _PRESENT.process == this_process() else None
