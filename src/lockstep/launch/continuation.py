"""Letting a run continue without workers that have ended: the launcher's side of `lockstep.comm.generations`."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from lockstep.channel.lines import Message
from lockstep.channel.server import ChannelServer
from lockstep.launch.membership import Changes, Generation, Stop, WorkerLimits, next_generation

_LOSS_SECONDS = 1.0
"""After a worker has reported that it lost another: how long until the launcher must have seen that one end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorker:
    """A worker that has ended without a report."""

    worker: int
    """Its number."""
    pid: int
    """Its process."""
    reason: str
    """How it ended, for messages."""


@final
class Continuation:
    """Decides for one launch whether and with whom it continues, and sends each worker what was decided.

    A run continues if every worker that is left has reported that it can.

    Args:
        server: Serves the workers' channels.
        num_workers: How many the launch began with.
        clock: Returns the time, in seconds.

    Attributes:
        generation: The present workers.
    """

    def __init__(self, server: ChannelServer, num_workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.generation = Generation(number=0, workers=tuple(range(num_workers)))
        self._server = server
        self._clock = clock
        self._ready: dict[int, WorkerLimits] = {}
        self._waiting: dict[int, tuple[int, float]] = {}
        self._is_over = False

    def receive_reports(self) -> None:
        """Take in what workers have reported, and answer those that have reported a loss of which there is none."""
        while not self._server.reports.empty():
            worker, message = self._server.reports.get()
            self._receive(worker, message)
        for worker, (generation, since) in list(self._waiting.items()):
            if generation < self.generation.number:
                del self._waiting[worker]
            elif self._is_over or self._clock() - since > _LOSS_SECONDS:
                del self._waiting[worker]
                self._server.send(worker, {"event": "unchanged"})

    def refuse(self) -> None:
        """Let the errors of workers stand: one has failed by an error of its own, so the run ends."""
        self._is_over = True
        self.receive_reports()

    def continue_without(self, ended: Collection[EndedWorker]) -> bool:
        """Continue without these workers, if possible; return whether it is."""
        self.receive_reports()
        lost = {each.worker for each in ended}
        left = [worker for worker in self.generation.workers if worker not in lost]
        if not all(worker in self._ready for worker in left):
            return False
        limits = WorkerLimits(
            min_workers=max((self._ready[worker].min_workers for worker in left), default=1),
            max_workers=min((self._ready[worker].max_workers for worker in left), default=1),
        )
        decided = next_generation(self.generation, Changes(lost=lost), limits)
        if isinstance(decided, Stop):
            for worker in left:
                self._server.send(worker, {"event": "stop", "reason": decided.reason})
            return False
        ranks = {worker: rank for rank, worker in enumerate(self.generation.workers)}
        described = [
            {"rank": ranks[each.worker], "pid": each.pid, "reason": each.reason}
            for each in ended
            if each.worker in ranks
        ]
        self.generation = decided
        for rank, worker in enumerate(decided.workers):
            self._server.send(worker, self._describe(rank, described))
        return True

    def _describe(self, rank: int, lost: list[dict[str, object]]) -> Message:
        generation = self.generation
        fields = {"number": generation.number, "rank": rank, "world_size": len(generation.workers)}
        return {"event": "generation", "lost": lost, **fields}

    def _receive(self, worker: int, message: Message) -> None:
        if message["report"] == "ready":
            limits = WorkerLimits(min_workers=message["min_workers"], max_workers=message["max_workers"])
            self._ready[worker] = limits
        elif message["report"] == "lost":
            self._waiting[worker] = message["generation"], self._clock()
