"""Watching the workers of a launched function until all have returned, or the launch has failed.

What ends, and what follows from it ([Note: what is a loss] in `started_worker.py`):

    a member of the run was ended by a signal       the others continue, if they can; else an error
    ... after it has returned a result              the same, and its result counts
    a member raised, or exited                      an error; the earliest failure is reported
    a worker that was to leave has left             nothing
    a new worker, before it has joined              a line, and the run goes on without it
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import final

from lockstep.launch.continuation import Continuation, EndedWorker
from lockstep.launch.control import ControlSocket
from lockstep.launch.exits import patience_after
from lockstep.launch.fencing import Fencing
from lockstep.launch.messages import Report, failed_error
from lockstep.launch.restarts import LostWorkersError
from lockstep.launch.scaling import Scaling
from lockstep.launch.started_worker import End, StartedWorker
from lockstep.launch.worker_pool import WorkerPool

_LOGGER = logging.getLogger("lockstep")


@final
class Supervision:
    """Waits for the workers of one launch, and lets the run continue when some are lost, leave or join."""

    def __init__(
        self,
        pool: WorkerPool,
        continuation: Continuation,
        scaling: Scaling,
        control: ControlSocket | None,
        fencing: Fencing,
        *,
        needs_every_result: bool = True,
    ) -> None:
        self._pool = pool
        self._continuation = continuation
        self._scaling = scaling
        self._control = control
        self._fencing = fencing
        self._needs_every_result = needs_every_result
        self._gone: set[int] = set()
        self._deadline = math.inf

    def wait(self) -> list[Report]:
        """Wait until every worker of the run has returned; return the reports of those that have, in rank order.

        `WorkerFailedError`: one failed, or was lost and the others could not continue.
        """
        while not self._is_complete():
            self._pool.handle_events(min(self._deadline, *self._timers()))
            self._continuation.receive_reports()
            self._continuation.reports.over.update(each.number for each in self._members() if each.has_returned)
            self._scaling.answer_loading_losses()
            self._fencing.advance()
            self._take_ends()
            if time.monotonic() >= self._deadline or (self._failed() and not self._running()):
                self._pool.failure = self._error()
                raise self._pool.failure
            if self._deadline == math.inf:
                self._scaling.advance()
            if self._control is not None:
                self._control.tell()
        self._continuation.refuse()
        self._continuation.announce_end()
        if self._control is not None:
            self._control.close()
        self._scaling.finish()
        self._pool.let_exit()
        if self._needs_every_result:
            self._tell_of_missing_results()
        return [report for worker in self._ever() if (report := worker.report) is not None and worker.has_returned]

    def _timers(self) -> Iterable[float]:
        yield self._continuation.next_answer
        yield self._scaling.next_look
        yield self._fencing.next_look
        for worker in self._pool.workers.values():
            yield worker.closed_until

    def _members(self) -> list[StartedWorker]:
        return [self._pool.workers[number] for number in self._continuation.generation.workers]

    def _ever(self) -> list[StartedWorker]:
        return [self._pool.workers[number] for number in self._continuation.members]

    def _running(self) -> list[StartedWorker]:
        return [worker for worker in self._members() if worker.end is End.NOT_YET]

    def _is_complete(self) -> bool:
        return all(worker.has_returned for worker in self._members())

    def _failed(self) -> list[StartedWorker]:
        """Return members that have failed, or that are lost and without which the others cannot continue."""
        return [
            worker
            for worker in self._pool.workers.values()
            if worker.number not in self._gone
            and worker.number in self._continuation.needed
            and worker.end in {End.FAILED, End.LOST}
        ]

    def _take_ends(self) -> None:
        """Act on workers that have ended since the last call."""
        ended = [worker for worker in self._pool.workers.values() if self._is_gone(worker)]
        needed = [worker for worker in ended if self._is_needed(worker)]
        own = [worker for worker in needed if worker.end is End.FAILED and not self._continuation.is_new(worker.number)]
        done = [worker for worker in ended if worker not in needed]
        if own:
            self._continuation.refuse()
        elif needed and not self._pool.is_terminating and self._continue_without(needed):
            done += needed
            self._deadline = math.inf
        else:
            own = [worker for worker in needed if not worker.has_returned]
        if own:
            self._deadline = min(self._deadline, time.monotonic() + patience_after(own))
        for worker in done:
            self._gone.add(worker.number)
            if worker.exit_code is None:  # a new worker that has failed to join, and has not ended yet
                self._pool.kill(worker, "by its launcher, because it has failed")
            self._scaling.take_end(worker)
            self._pool.release(worker)

    def _is_gone(self, worker: StartedWorker) -> bool:
        """Return whether a worker has ended, or will, and nothing has followed from it yet."""
        if worker.number in self._gone:
            return False
        is_done = worker.end is End.FAILED or (worker.has_returned and not self._is_needed(worker))
        return worker.exit_code is not None or is_done

    def _is_needed(self, worker: StartedWorker) -> bool:
        if worker.end is End.LEFT:
            return worker.number in self._continuation.generation.workers
        return worker.number in self._continuation.needed

    def _continue_without(self, lost: list[StartedWorker]) -> bool:
        """Let the others continue, if they can; two workers must never have one rank, so these have ended before."""
        for worker in lost:
            if worker.exit_code is None:  # a new worker that raised
                self._pool.kill(worker, "by its launcher, because it has failed")
        return self._continuation.continue_without(
            [EndedWorker(worker=each.number, pid=each.pid, reason=_describe(each)) for each in lost]
        )

    def _error(self) -> Exception:
        """Return the error; those without which the others continued are its cause if all others follow from a loss."""
        failed = [worker for worker in self._ever() if worker.end in {End.FAILED, End.LOST}]
        earlier = [worker for worker in failed if worker.number in self._gone]
        present = [worker for worker in failed if worker not in earlier]
        if all(worker.is_consequence() for worker in present):
            earlier, present = [], failed
        failures = [(worker.is_consequence(), *worker.describe_failure()) for worker in present]
        failures.sort(key=lambda failure: failure[:2])
        names = ", ".join(f"worker {worker.number} ({worker.describe_end()})" for worker in earlier)
        before = f"Before that, the others had continued without {names}." if earlier else ""
        reasons = "\n\n".join(filter(None, (self._continuation.stop_reason, before)))
        error = failed_error(tuple(failure for *_, failure in failures), reasons)
        lost = [worker for worker in failed if worker.end is End.LOST]
        if not lost or self._pool.is_stopping:
            return error
        if any(worker.end is End.FAILED and not worker.is_consequence() for worker in failed):
            return error
        described = "; ".join(f"Worker {each.number} (pid {each.pid}) was {each.describe_end()}" for each in lost)
        numbers = frozenset(worker.number for worker in lost)
        return LostWorkersError(error, numbers, described, has_begun=self._continuation.has_begun)

    def _tell_of_missing_results(self) -> None:
        ever = self._ever()
        lost = [worker for worker in ever if worker.end is End.LOST]
        if lost:
            names = "; ".join(
                f"worker {worker.number} (pid {worker.pid}) was {worker.describe_end()}" for worker in lost
            )
            counts = f"{sum(worker.has_returned for worker in ever)} of {len(ever)}"
            _LOGGER.warning("%s workers have returned a result: %s. (LS601)", counts, names)


def _describe(worker: StartedWorker) -> str:
    """Return how a worker has ended, for the message of those that continue."""
    if worker.report is not None and worker.end is End.FAILED:
        return f"failed while it joined: {worker.report.reason}"
    if worker.end is End.LEFT:
        return "has left"
    return worker.describe_end()
