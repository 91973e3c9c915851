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
import re
import time
from dataclasses import dataclass, replace
from typing import final

from lockstep.channel.table import Message
from lockstep.devices import Device, place_workers
from lockstep.devices.choose import CPU
from lockstep.errors import DeviceError, counted
from lockstep.launch.continuation import Continuation
from lockstep.launch.control import RefusedError
from lockstep.launch.membership import Wishes, WorkerLimits
from lockstep.launch.restarts import FIXED, Elastic
from lockstep.launch.worker_pool import End, Worker, WorkerPool

_LOGGER = logging.getLogger("lockstep")
_GATHER_SECONDS = 0.25
"""After a worker has got SIGTERM: how long to wait whether all get it, which is a request to stop the run."""
_NUMBER = re.compile(r"(?:gpu)?[ :]?(\d+(?::\d+)?)")
_UUID = re.compile(r"(?:gpu|mig)-[\w/-]*")
_LABEL = re.compile(r"\bGPU (\d+(?::\d+)?)(?= \()")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLaunch:
    pool: WorkerPool
    continuation: Continuation
    elastic: Elastic = FIXED
    force: bool = False
    needs_every_result: bool = False


@final
class Scaling:
    """Keeps the number of workers at what is wanted; `problem` says why the last new one did not join, if so."""

    def __init__(self, launch: RunningLaunch) -> None:
        self.num_wanted = len(launch.continuation.generation.workers)
        self.problem = ""
        self._pool = launch.pool
        self._continuation = launch.continuation
        self._limit = launch.elastic.limit
        self._loading_limit = launch.elastic.loading_limit
        self._num_spares = launch.elastic.spares
        self._force = launch.force
        self._new: dict[int, Worker] = {}
        self._leaving: set[int] = set()
        self._vacant: list[Device] = []
        self._respawned_at: list[float] = []

    # -- What is wanted ------------------------------------------------------------------------------------------------

    def let_go(self, worker: int) -> None:
        if worker not in self._leaving:
            self._leaving.add(worker)
            self.num_wanted -= 1

    @property
    def is_reached(self) -> bool:
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
            goes_on = self._loading_limit.take(self._respawned_at, time.monotonic())
            self._continuation.tell_of_loading_loss(worker, report, goes_on=goes_on)

    def take_end(self, worker: Worker) -> None:
        number = worker.number
        was_new = self._new.pop(number, None) is not None
        was_leaving = number in self._leaving
        self._leaving.discard(number)
        self._continuation.reports.waiting = [each for each in self._continuation.reports.waiting if each != number]
        if was_leaving or worker.end is End.LEFT:
            return
        if was_new and worker.end is not End.LOST:
            self._give_up(worker)
        elif self._limit.take(self._respawned_at, time.monotonic()):
            self._vacant.append(worker.device)
        elif was_new:
            self.problem = f"The new worker {number} was {worker.describe_end()}."
            self.num_wanted = self._num_staying()
        elif self._num_spares:
            self._num_spares -= 1
        else:
            self.num_wanted = max(self.num_wanted - 1, 1)

    def _num_staying(self) -> int:
        return len({*self._continuation.generation.workers} - self._leaving)

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
            if time.monotonic() - since < _GATHER_SECONDS:
                continue
            del asked[worker]
            if worker in self._new and not self._pool.is_stopping:
                self._end_new(self._new[worker])
                continue
            is_possible = limits is not None and num_left >= max(limits.min_workers, 1) and not continuation.is_over
            if is_possible and not self._pool.is_stopping and worker in members:
                self.let_go(worker)
            else:
                self._pool.server.send(worker, {"event": "stay"})

    def _end_new(self, worker: Worker) -> None:
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
            try:
                worker = self._pool.start(max(self._pool.workers) + 1, device)
            except OSError as error:  # no memory, process or descriptor is left for it
                self._stop_starting(f"A new worker could not be started: {error}.")
                return
            self._continuation.pids[worker.number] = worker.pid
            self._new[worker.number] = worker

    def _find_devices(self, number: int) -> list[Device]:
        if all(worker.device.name == CPU.name for worker in self._pool.workers.values()):
            return [CPU] * number
        return list(place_workers(f"auto:{number}", force=self._force).devices)

    def _give_up(self, worker: Worker) -> None:
        """Start no more workers: this one has ended by its own code, so the next one would too."""
        trace = ""
        if worker.has_returned:
            how = "has returned without joining: its function must call `Trainer.join()` before it trains"
        elif (failure := worker.failure()).traceback:
            how, trace = f"has failed: {failure.reason}", failure.traceback.rstrip()
        else:
            how = worker.describe_end()
        self._stop_starting(f"The new worker {worker.number} {how}.", trace)

    def _stop_starting(self, problem: str, trace: str = "") -> None:
        self.problem = problem
        between = f"\n{trace}\n" if trace else " "
        _LOGGER.warning("%s%sThe others train on, and no other worker is started. (LS603)", problem, between)
        self._num_spares = 0
        self._limit = replace(self._limit, count=0)
        self.num_wanted = self._num_staying()

    # -- Requests of `lockstep scale` ----------------------------------------------------------------------------------

    def begin_request(self, request: Message) -> str:
        what = request.get("op")
        if what == "describe":
            return self.describe()
        limits = self._check_possible()
        if what == "resize" and type(request.get("workers")) is int:
            return self._resize(request["workers"], limits)
        if what == "release" and isinstance(request.get("device"), str):
            return self._release(request["device"], limits)
        raise RefusedError(f"The request {str(request)[:80]} is none that this version of Lockstep knows. (LS603)")

    def request_result(self) -> str | None:
        if self.problem:
            raise RefusedError(f"{self.problem} The run goes on: {self.describe()}. (LS603)")
        return self.describe() if self.is_reached else None

    def describe(self) -> str:
        members = self._continuation.generation.workers
        names = [
            f"rank {rank} (pid {self._continuation.pids[worker]}) on {self._pool.workers[worker].device.label}"
            for rank, worker in enumerate(members)
        ]
        return f"{counted(len(members), 'worker')}: {', '.join(names)}"

    def _check_possible(self) -> WorkerLimits:
        if self._pool.is_stopping or self._continuation.is_over:
            raise RefusedError("The run is ending, so its workers do not change any more. (LS603)")
        limits = self._continuation.limits
        if limits is None:
            raise RefusedError(
                "The workers of this run cannot change: it is still starting, or its trainer was not made with "
                'on_worker_loss="continue", which on GPUs is not the default. If it is starting, try again when it '
                "trains. (LS603)"
            )
        if not self.is_reached:
            raise RefusedError("The workers of this run are changing already. Try again when that has ended. (LS603)")
        return limits

    def _resize(self, num_workers: int, limits: WorkerLimits) -> str:
        members = self._continuation.generation.workers
        if num_workers > limits.max_workers:
            raise RefusedError(
                f"{num_workers} workers cannot share {counted(limits.max_workers, 'shard')}: some would have nothing "
                f"to do. Ask for at most {limits.max_workers}. (LS603)"
            )
        if num_workers < max(limits.min_workers, 1):
            raise RefusedError(
                f"{counted(num_workers, 'worker')} would be fewer than min_workers, which is {limits.min_workers}. To "
                "stop the run, send its launcher SIGTERM. (LS603)"
            )
        num_more = num_workers - len(members)
        devices: list[Device] = []
        if num_more > 0:
            try:
                devices = self._find_devices(num_more)
            except DeviceError as error:
                raise RefusedError(f"{error}") from error
        self.problem, self.num_wanted, self._vacant = "", num_workers, [*devices, *self._vacant]
        if num_more == 0:
            return "The run has as many workers already."
        if num_more < 0:
            return f"{counted(-num_more, 'worker')} of {len(members)} will leave after the current step."
        labels = ", ".join(device.label for device in devices)
        return f"{counted(num_more, 'worker')} will join between two steps, when it is ready: {labels}."

    def _release(self, device: str, limits: WorkerLimits) -> str:
        members = self._continuation.generation.workers
        named = {
            worker: parts for worker in members if (parts := named_parts(device, self._pool.workers[worker].device))
        }
        found = list(named)
        if len(parts := set[str]().union(*named.values())) > 1:
            raise RefusedError(f"{device} means {' and '.join(sorted(parts))}. Name one of them. (LS603)")
        if not found:
            raise RefusedError(f"No worker of this run uses {device}. It has {self.describe()}. (LS603)")
        num_left = len(members) - len(found)
        if num_left < max(limits.min_workers, 1):
            raise RefusedError(
                f"Without {device} the run would have {counted(num_left, 'worker')}, and min_workers is "
                f"{limits.min_workers}. To stop the run, send its launcher SIGTERM. (LS603)"
            )
        self.problem = ""  # of an earlier request
        for worker in found:
            self.let_go(worker)
        return f"{counted(len(found), 'worker')} of {len(members)} will leave after the current step."


def named_parts(name: str, device: Device) -> set[str]:
    """Return the cards of a device that a name means, as `device_ids` names them: "GPU2", "2", "0:1", UUIDs.

    The number of a card that is split by MIG means none of its instances; a UUID may be given by its beginning.
    """
    if not device.visible:
        return set()
    wanted = name.strip().lower()
    if (number := _NUMBER.fullmatch(wanted)) is not None:
        return {each for each in _LABEL.findall(device.label) if each == number[1]}
    return {each for each in device.visible.split(",") if _UUID.fullmatch(wanted) and each.lower().startswith(wanted)}
