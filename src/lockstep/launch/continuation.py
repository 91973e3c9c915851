"""Letting a run continue with other workers: the launcher's side of `lockstep.comm.generations`.

    unplanned     a worker is lost: the others join the next generation at once
    planned       a worker leaves or joins: the members join the next generation after the same step

A planned generation is announced only when every member has joined the last one. If a worker is lost before all have
joined the planned one, an unplanned one supersedes it. Nobody knows then who has made the step boundary. So workers
that were to leave are members again as long as they run, and are asked once more later. New workers that have not
joined are set aside, and join at a later boundary: the others may be in an evaluation, which they do not make.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.channel.table import Message
from lockstep.launch.membership import Changes, Generation, Stop, Wishes, WorkerLimits, next_generation, planned_changes

_FRESH_SECONDS = 3.0
"""How long ago a new worker may have been heard of that is to join now; it is asked every second (`Fencing`)."""
_LOSS_SECONDS = 1.0
"""After a worker has reported that it lost another: how long until the launcher must have seen that one end."""
_FIELDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ready": ("min_workers", "max_workers"),
        "lost": ("generation",),
        "loading_lost": ("pid", "reason"),
        "raised": ("threads",),
        "alive": ("number", "waits", "calls", "place"),
    }
)
"""What is in a report besides its name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker has answered to the question whether it is there."""

    number: int
    waits: bool | None
    """Whether its main thread waits for other workers; None if that is not known."""
    calls: int
    place: str
    """The line that its main thread runs."""


@dataclass(slots=True)
class WorkerReports:
    """What workers have reported about themselves, by their numbers."""

    ready: dict[int, WorkerLimits] = field(default_factory=dict)
    """Those that can continue with other workers."""
    waiting: list[int] = field(default_factory=list)
    """New workers that have built everything and wait for a generation, in that order."""
    leaving: dict[int, float] = field(default_factory=dict)
    """Workers that have asked to leave, and when."""
    lost_loading: list[tuple[int, Message]] = field(default_factory=list)
    """Workers of which a loading process was killed, with the reports about it."""
    over: set[int] = field(default_factory=set)
    alive: dict[int, Answer] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    raised: list[tuple[int, list[str]]] = field(default_factory=list)
    """Scripts whose main thread has raised, with the threads that keep them from ending."""


@final
class Continuation:
    """Decides for one launch whether and with whom it continues, and sends each worker what was decided.

    A run continues if every worker that is left has reported that it can. `generation` is the present one, or the
    announced one; `members` are all that were ever in one, in rank order. The owner adds new workers to `pids`.
    """

    def __init__(
        self, server: ChannelServer, pids: dict[int, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.generation = self._settled = Generation(number=0, workers=tuple(pids))
        self.pids = dict(pids)
        self.reports = WorkerReports()
        self.members = list(pids)
        self.has_begun = False
        self.stop_reason = ""
        self._server = server
        self._clock = clock
        self._asking: dict[int, tuple[int, float]] = {}
        self._joined = set(pids)
        self._leaving: tuple[int, ...] = ()
        self._new: set[int] = set()
        self._meeting: set[int] | None = None
        self._decided_at = 0.0
        self._is_over = False

    def receive_reports(self) -> None:
        """Take in what workers have reported, and answer those that have reported a loss of which there is none."""
        for worker, message in self._server.take_reports():
            if all(name in message for name in _FIELDS.get(str(message["report"]), ())):
                self._receive(worker, message)  # else the user's code wrote to the descriptor
        for worker, (generation, since) in list(self._asking.items()):
            if generation < self.generation.number:
                del self._asking[worker]
            elif self._is_over or self._clock() - since > _LOSS_SECONDS:
                del self._asking[worker]
                self._server.send(worker, {"event": "unchanged"})

    @property
    def next_answer(self) -> float:
        """When a worker that has reported a loss is answered, if there is none; infinity if nobody waits."""
        return min((since + _LOSS_SECONDS for _, since in self._asking.values()), default=float("inf"))

    def refuse(self) -> None:
        """Change nothing from now on: one has failed by an error of its own, or all have ended, so the run ends."""
        self._is_over = True
        self.receive_reports()

    def announce_end(self) -> None:
        """Tell the members that all have returned: who waits for others at a meeting would wait in vain."""
        for worker in self.generation.workers:
            self._server.send(worker, {"event": "over"})

    def tell_of_loading_loss(self, worker: int, report: Message, *, goes_on: bool) -> None:
        lost = {"rank": self._rank_of(worker), "pid": report["pid"], "reason": report["reason"], "goes_on": goes_on}
        for each in {worker, *self.generation.workers}:
            self._server.send(each, {"event": "loading_lost", "process": lost})

    @property
    def limits(self) -> WorkerLimits | None:
        """How many workers the run can have; None if one of them cannot continue with others."""
        return self._limits(self.generation.workers)

    def arrived(self) -> tuple[int, ...]:
        """Return the new workers that wait to join, but none that was silent for some time: it may be stopped."""
        earliest = self._clock() - _FRESH_SECONDS
        return tuple(worker for worker in self.reports.waiting if self.reports.heard_at[worker] >= earliest)

    @property
    def is_settled(self) -> bool:
        return self._settled is self.generation

    @property
    def is_over(self) -> bool:
        """Whether a planned change makes no sense any more: the run ends, or a worker makes no calls any more."""
        return self._is_over or bool(self.reports.over.intersection(self.generation.workers))

    @property
    def absent(self) -> tuple[int, ...]:
        """Members for whom others wait, to make the generation that follows a loss: they have not left the old one."""
        if not self._meeting or self.is_settled:
            return ()
        return tuple(worker for worker in self.generation.workers if worker not in self._meeting)

    @property
    def decided_for(self) -> float:
        """For how many seconds the present generation is decided."""
        return self._clock() - self._decided_at

    def is_new(self, worker: int) -> bool:
        """Return whether a worker was announced, and has not reported that it has joined."""
        return worker in self._new

    @property
    def needed(self) -> tuple[int, ...]:
        """Workers that the others need: of the present generation, and those that leave after the step under way."""
        return (*self.generation.workers, *self._leaving)

    def continue_without(self, ended: Mapping[int, str]) -> bool:
        """Continue without these workers, which ended for these reasons, if possible; return whether it is."""
        self._server.settle()  # a new worker may have joined before another was lost, and then has the state of the run
        self.receive_reports()
        if self._is_over:  # also for who was to leave: the launch must not wait on as if nothing had failed
            return False
        lost = set(ended)
        # Who was to leave has, if a member has joined without it.
        were_to_leave = () if self._joined else self._leaving
        present = [worker for worker in self.members if worker in {*self.generation.workers, *were_to_leave}]
        holders = tuple(worker for worker in present if worker not in self._new)
        if not lost.intersection(present):
            return True
        left = [worker for worker in present if worker not in lost]
        limits = self._limits([worker for worker in left if worker not in self._new])
        if limits is None:
            return False
        before = Generation(number=self.generation.number, workers=holders)
        decided = next_generation(before, Changes(lost=lost), limits)
        if isinstance(decided, Stop):
            self._is_over, self.stop_reason = True, decided.reason
            for worker in left:
                self._server.send(worker, {"event": "stop", "reason": decided.reason})
            return False
        if decided is before:  # a new worker alone was lost: the members leave the generation that they were to make
            decided = Generation(number=before.number + 1, workers=holders)
        described: list[dict[str, object]] = [
            {"rank": self._rank_of(worker), "pid": self.pids[worker], "reason": reason}
            for worker, reason in ended.items()
            if worker in present
        ]
        self._set_aside(self._new - lost)
        self._announce(decided, new=set(), lost=described)
        return True

    def _set_aside(self, new: set[int]) -> None:
        self.members = [worker for worker in self.members if worker not in self._new]
        self.reports.waiting = [*sorted(new), *self.reports.waiting]
        for worker in new:
            self._server.send(worker, {"event": "set_aside"})

    def change(self, wishes: Wishes) -> Changes:
        """Announce who leaves and who joins at the next step boundary; return it, empty where nobody does."""
        limits = self.limits
        if not self.is_settled or self.is_over or limits is None:
            return Changes()
        changes = planned_changes(self.generation, wishes, limits)
        decided = next_generation(self.generation, changes, limits)
        if isinstance(decided, Stop) or decided is self.generation:
            return Changes()
        self._announce(decided, new=set(changes.arrived), leaving=tuple(changes.leaving))
        self.reports.waiting = [worker for worker in self.reports.waiting if worker not in changes.arrived]
        self.members.extend(changes.arrived)
        return changes

    def _announce(
        self,
        decided: Generation,
        *,
        new: set[int],
        lost: Collection[dict[str, object]] = (),
        leaving: tuple[int, ...] = (),
    ) -> None:
        message = {
            "event": "generation",
            "number": decided.number,
            "world_size": len(decided.workers),
            "lost": list(lost),
            "planned": not lost,
            "arrived": [
                {"rank": rank, "pid": self.pids[worker]} for rank, worker in enumerate(decided.workers) if worker in new
            ],
            "leaving": [{"rank": self._rank_of(worker), "pid": self.pids[worker]} for worker in leaving],
        }
        self.generation, self._new, self._leaving, self._joined = decided, new, leaving, set()
        self._meeting, self._decided_at = (set() if lost else None), self._clock()
        for rank, worker in enumerate(decided.workers):
            self._server.send(worker, {**message, "rank": rank})
        for worker in leaving:
            self._server.send(worker, {**message, "rank": None})

    def _rank_of(self, worker: int) -> int | None:
        rank = self._settled.rank_of(worker)
        return self.generation.rank_of(worker) if rank is None else rank

    def _limits(self, workers: Collection[int]) -> WorkerLimits | None:
        if not all(worker in self.reports.ready for worker in workers):
            return None
        ready = [self.reports.ready[worker] for worker in workers]
        return WorkerLimits(
            min_workers=max((each.min_workers for each in ready), default=1),
            max_workers=min((each.max_workers for each in ready), default=1),
        )

    def _receive(self, worker: int, message: Message) -> None:
        reports = self.reports
        reports.heard_at[worker] = self._clock()
        what = message["report"]
        if what == "ready":
            reports.ready[worker] = WorkerLimits(min_workers=message["min_workers"], max_workers=message["max_workers"])
            self.has_begun |= all(member in reports.ready for member in self.generation.workers)
        elif what == "lost":
            self._asking[worker] = message["generation"], self._clock()
        elif what == "waiting_to_join" and worker not in reports.waiting and worker not in self.members:
            reports.waiting.append(worker)
        elif what == "leave":
            reports.leaving.setdefault(worker, self._clock())
        elif what == "loading_lost":
            reports.lost_loading.append((worker, message))
        elif what == "over":
            reports.over.add(worker)
        elif what == "raised":
            reports.raised.append((worker, message["threads"]))
        elif what == "alive":
            reports.alive[worker] = Answer(message["number"], message["waits"], message["calls"], message["place"])
        elif message.get("generation") == self.generation.number:
            self._follow(worker, what)

    def _follow(self, worker: int, what: str) -> None:
        if what == "meets" and self._meeting is not None:
            self._meeting.add(worker)
        elif what in {"has_state", "joined"}:
            self._new.discard(worker)
            self._joined |= {worker} if what == "joined" else set()
            if self._joined.issuperset(self.generation.workers):
                self._settled, self._leaving = self.generation, ()
