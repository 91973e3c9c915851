"""Growing and shrinking a run that trains: which workers to start, which to let go.

    is wanted                        what this does
    ---------                        --------------
    a lost worker is replaced        starts a worker on the same device, as often as `Elastic.respawn` allows
    spares                           starts more workers than the run has, when none is missing; they wait
    a worker has got SIGTERM         asks the continuation to let it leave
    `lockstep scale`                 starts workers, or lets some leave

A new worker imports, builds, and waits. Then it joins at a step boundary.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import final

from lockstep.devices import Device
from lockstep.errors import DeviceError
from lockstep.launch.continuation import Continuation
from lockstep.launch.elastic import Elastic
from lockstep.launch.membership import Wishes, may_respawn
from lockstep.launch.started_worker import End, StartedWorker
from lockstep.launch.worker_pool import WorkerPool

_LOGGER = logging.getLogger("lockstep")
_GATHER_SECONDS = 0.25
"""After a worker has got SIGTERM: how long to wait whether all get it, which is a request to stop the run."""


@final
class Scaling:
    """Keeps the number of workers at what is wanted; `find_devices` raises `DeviceError` where there are none.

    `problem` says why the last new worker did not join; empty if it did.
    """

    def __init__(
        self,
        pool: WorkerPool,
        continuation: Continuation,
        elastic: Elastic,
        start: Callable[[Device], StartedWorker],
        find_devices: Callable[[int], list[Device]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_wanted = len(continuation.generation.workers)
        self.problem = ""
        self._pool = pool
        self._continuation = continuation
        self._limit = elastic.limit
        self._loading_limit = elastic.loading_limit
        self._num_spares = elastic.spares
        self._start = start
        self._find_devices = find_devices
        self._clock = clock
        self._new: dict[int, StartedWorker] = {}
        self._leaving: set[int] = set()
        self._vacant: list[Device] = []
        self._respawned_at: list[float] = []

    # -- What is wanted ------------------------------------------------------------------------------------------------

    def resize(self, num_workers: int, devices: list[Device]) -> None:
        """Let the run have so many workers; new ones get these devices first."""
        self.problem = ""
        self.num_wanted = num_workers
        self._vacant = [*devices, *self._vacant]

    def let_go(self, worker: int) -> None:
        """Let a worker leave, without another in its place."""
        if worker not in self._leaving:
            self._leaving.add(worker)
            self.num_wanted -= 1

    @property
    def is_reached(self) -> bool:
        """Whether the run has the workers that are wanted, and all of them have joined."""
        workers = self._continuation.generation.workers
        is_left = self._leaving.isdisjoint(workers)
        return self._continuation.is_settled and is_left and len(workers) == self.num_wanted

    # -- What happens --------------------------------------------------------------------------------------------------

    @property
    def next_look(self) -> float:
        """When `advance` has something to do, if nothing happens before; infinity for never."""
        asked = self._continuation.reports.leaving.values()
        return min((since + _GATHER_SECONDS for since in asked), default=float("inf"))

    def advance(self) -> None:
        """Start the workers that are missing, and announce who leaves and who joins."""
        continuation = self._continuation
        for worker in [each for each in continuation.generation.workers if not continuation.is_new(each)]:
            self._new.pop(worker, None)
        self._take_requests()
        if continuation.is_over:
            self._end_announced()
        if self._pool.is_stopping or continuation.is_over or continuation.limits is None:
            return
        self._start_missing()
        wishes = Wishes(num_workers=self.num_wanted, leaving=self._leaving, arrived=continuation.arrived())
        changes = continuation.change(wishes)
        for worker in changes.leaving:
            self._pool.workers[worker].may_leave = True

    def answer_loading_losses(self) -> None:
        """Decide for each killed loading process whether it is started anew: it counts as a lost worker does."""
        reports, self._continuation.reports.lost_loading = self._continuation.reports.lost_loading, []
        for worker, report in reports:
            goes_on = may_respawn(self._loading_limit, self._respawned_at, self._clock())
            if goes_on:
                self._respawned_at.append(self._clock())
            self._continuation.tell_of_loading_loss(worker, report, goes_on=goes_on)

    def take_end(self, worker: StartedWorker) -> None:
        """Take note of a worker that has ended: lost, left, or never joined."""
        number = worker.number
        was_new = self._new.pop(number, None) is not None
        was_leaving = number in self._leaving
        self._leaving.discard(number)
        self._continuation.reports.waiting = [each for each in self._continuation.reports.waiting if each != number]
        if was_leaving or worker.end is End.LEFT:
            return
        if was_new and worker.end is not End.LOST:
            self._give_up(worker)
        elif may_respawn(self._limit, self._respawned_at, self._clock()):
            self._respawned_at.append(self._clock())
            self._vacant.append(self._pool.devices[number])
        elif was_new:
            self.problem = f"The new worker {number} was {worker.describe_end()}."
            self.num_wanted = len(self._continuation.generation.workers)
        elif self._num_spares:
            self._num_spares -= 1
        else:
            self.num_wanted = max(self.num_wanted - 1, 1)

    def finish(self) -> None:
        for worker in self._new.values():
            self._pool.kill(worker, "by its launcher, because the run is over")
        self._new.clear()

    def _end_announced(self) -> None:
        """End new workers for which the others would wait in vain: these begin no step any more."""
        for number, worker in self._new.items():
            if self._continuation.is_new(number) and worker.exit_code is None:
                self._pool.kill(worker, "by its launcher, because the run is over")

    def _take_requests(self) -> None:
        """Let workers go that have got SIGTERM, or tell them that they cannot."""
        continuation = self._continuation
        asked = continuation.reports.leaving
        members = continuation.generation.workers
        limits = continuation.limits
        num_left = len([worker for worker in members if worker not in {*asked, *self._leaving}])
        for worker, since in list(asked.items()):
            if self._clock() - since < _GATHER_SECONDS:
                continue
            del asked[worker]
            if worker in self._new and not self._pool.is_stopping:
                self._end_new(self._new[worker])
                continue
            is_possible = limits is not None and num_left >= max(limits.min_workers, 1) and not continuation.is_over
            if is_possible and not self._pool.is_stopping and worker in members:
                self.let_go(worker)
            else:
                continuation.refuse_leave(worker)

    def _end_new(self, worker: StartedWorker) -> None:
        """End a worker that was asked to leave before it has joined, without another in its place."""
        self._leaving.add(worker.number)
        if self._num_spares:
            self._num_spares -= 1
        else:
            self.num_wanted -= 1
        self._pool.kill(worker, "by its launcher, because it was asked to leave")

    def _start_missing(self) -> None:
        members = [worker for worker in self._continuation.generation.workers if worker not in self._leaving]
        waiting = [worker for worker in self._new if worker not in members]
        missing = self.num_wanted - len(members)
        # The start of a process takes a core for seconds: no spare is started while the others wait for a new worker.
        is_complete = missing <= 0 and self._continuation.is_settled
        for _ in range(missing + (self._num_spares if is_complete else 0) - len(waiting)):
            try:
                device = self._vacant.pop(0) if self._vacant else self._find_devices(1)[0]
            except DeviceError as error:  # for a spare: a lost worker leaves its device
                _LOGGER.warning("No spare worker is started. %s (LS603)", error)
                self._num_spares = 0
                return
            worker = self._start(device)
            self._new[worker.number] = worker

    def _give_up(self, worker: StartedWorker) -> None:
        """Start no more workers: this one has ended by its own code, so the next one would too."""
        trace = " "
        if worker.has_returned:
            how = "has returned without joining: its function must call `Trainer.join()` before it trains"
        elif worker.report is not None:
            how, trace = f"has failed: {worker.report.reason}", f"\n{worker.report.traceback.rstrip()}\n"
        else:
            how = worker.describe_end()
        self.problem = f"The new worker {worker.number} {how}."
        _LOGGER.warning("%s%sThe others train on, and no other worker is started. (LS603)", self.problem, trace)
        self._num_spares = 0
        self._limit = replace(self._limit, count=0)
        self.num_wanted = len(self._continuation.generation.workers)
