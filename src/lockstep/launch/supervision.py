"""Watching the workers of a launched function until all have returned, or the launch has failed.

What ends, and what follows from it ([Note: what is a loss] in `worker_pool.py`):

    a member of the run was ended by a signal       the others continue, if they can; else an error
    ... after it has returned a result              the same, and its result counts
    a member raised, or exited                      an error; the earliest failure is reported
    a worker that was to leave has left             nothing
    a new worker, before it has joined              a line, and the run goes on without it
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, final

from lockstep.errors import WorkerFailedError
from lockstep.launch.control import ControlSocket
from lockstep.launch.exits import EARLIER_FAILURE_SECONDS, ROOT_CAUSE_SECONDS, SURE_SECONDS, describe_failures
from lockstep.launch.restarts import LostWorkersError
from lockstep.launch.scaling import RunningLaunch, Scaling
from lockstep.launch.worker_pool import End, Worker

AnyWorker = TypeVar("AnyWorker", bound=Worker)
_LOGGER = logging.getLogger("lockstep")
_QUESTIONS = 5
"""So many questions are asked in the time after which a worker is ended."""
_NEW_SECONDS = 5.0
"""How long a new worker that is to join may be silent."""
_FIRST_LOOK_SECONDS = 1.0
"""After a loss: how long the others may wait for a member before it is asked where it is, ..."""
_LATE_SECONDS = 5.0
"""... before a line tells of it, ..."""
_STUCK_SECONDS = 20.0
"""... and before it is ended, if it waits in a call that cannot end: those were ended when it was told of the loss."""
_RECENT_QUESTIONS = 3
"""A worker that has answered one of so many last questions is there."""


@final
class Fencing:
    """Ends workers that hang, as long as `Elastic.evict_after` says, so that the others can continue without them.

    The launcher asks each member in turn, also one that is to leave after the step under way; the thread that reads the
    worker's channel answers, and says where the main thread stands. Two kinds of workers are ended:

        is silent     the process is stopped, or hangs in the kernel or in native code that holds Python's lock
        keeps others  its main thread neither completes a call of the trainer nor waits for others, while another worker
        waiting       waits all that time: an endless loop or a disk that hangs, in the loss or in a save

    A worker of which it is not known where its main thread stands (`stack_of_thread`) neither waits nor keeps others
    waiting.

    A worker is killed, and has ended, before the others hear of it: two workers never have one rank, also when the
    process would have gone on a moment later. A new worker that has not joined is ended when it is silent for a few
    seconds, whatever the options say: nothing is lost with it, and the others would wait for it. So is a member that
    does not come to the next generation after a loss, because it still waits in a call of the last one: that call never
    ends. If it is in other code, a line tells where.
    """

    def __init__(self, launch: RunningLaunch, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = launch.pool
        self._continuation = launch.continuation
        self._seconds = launch.elastic.evict_after or math.inf
        self._clock = clock
        self._number = 0
        self._asked: dict[int, list[tuple[int, float]]] = {}
        self._since: dict[int, tuple[tuple[bool | None, int], float]] = {}
        self._told: tuple[int, set[int]] = 0, set()
        self._next_look = clock()

    @property
    def next_look(self) -> float:
        """When `advance` has something to do; infinity where nobody is to be asked."""
        if self._watched():
            return self._next_look
        continuation = self._continuation
        return self._clock() + _FIRST_LOOK_SECONDS - continuation.decided_for if continuation.absent else math.inf

    def advance(self) -> None:
        now = self._clock()
        watched = self._watched()
        if not watched or now < self._next_look:
            return
        pause = min(*watched.values(), _LATE_SECONDS if self._absent() else math.inf) / _QUESTIONS
        if now - self._next_look > pause:  # this process was stopped itself, or the machine slept, or nobody was asked
            self._asked.clear()
            self._since.clear()
            self._continuation.reports.alive.clear()
        self._next_look = now + pause
        self._number += 1
        for worker, seconds in watched.items():
            if self._is_silent(worker, seconds, now):
                self._kill(worker, f"it has not answered for {seconds:g} s")
            else:
                self._pool.server.send(worker, {"event": "ping", "number": self._number})
        self._note_answers(now)
        if self._seconds < math.inf:
            self._end_those_that_keep_others_waiting(now)
        if self._continuation.decided_for >= _LATE_SECONDS:
            self._tell_of_absent(now)

    def _absent(self) -> tuple[int, ...]:
        return self._continuation.absent if self._continuation.decided_for >= _FIRST_LOOK_SECONDS else ()

    def _watched(self) -> dict[int, float]:
        """Return who is asked, and how long each may be silent."""
        continuation = self._continuation
        members = [worker for worker in continuation.needed if worker in continuation.reports.ready]
        new = {*continuation.reports.waiting, *filter(continuation.is_new, members)}
        asked = members if self._seconds < math.inf else self._absent()
        found = dict.fromkeys(asked, self._seconds)
        return {**found, **{worker: min(self._seconds, _NEW_SECONDS) for worker in new}}

    def _is_silent(self, worker: int, seconds: float, now: float) -> bool:
        answer = self._continuation.reports.alive.get(worker)
        answered = 0 if answer is None else answer.number
        open_questions = [each for each in self._asked.get(worker, []) if each[0] > answered]
        self._asked[worker] = [*open_questions, (self._number, now)]
        return len(open_questions) >= _QUESTIONS and now - open_questions[0][1] >= seconds

    def _note_answers(self, now: float) -> None:
        """Note since when each worker that the others need waits or not, and completes no call."""
        found = {}
        for worker in self._continuation.needed:
            answer = self._continuation.reports.alive.get(worker)
            if answer is not None and worker in self._continuation.reports.ready:
                before, since = self._since.get(worker, (None, now))
                stand = (answer.waits, answer.calls)
                found[worker] = stand, since if stand == before else now
        self._since = found

    def _end_those_that_keep_others_waiting(self, now: float) -> None:
        alive = self._continuation.reports.alive
        long = [worker for worker, (_, since) in self._since.items() if now - since >= self._seconds]
        # A new worker waits for the next step, however long the others take for this one.
        waiting = any(alive[worker].waits and not self._continuation.is_new(worker) for worker in long)
        for worker in long if waiting else ():
            if alive[worker].waits is False:
                said = f"others have waited for it for {self._seconds:g} s: it was in {alive[worker].place}"
                self._kill(worker, said)

    def _tell_of_absent(self, now: float) -> None:
        """Tell of members that do not come to the next generation, and end one that waits in the last one."""
        continuation = self._continuation
        if self._told[0] != continuation.generation.number:
            self._told = continuation.generation.number, set()
        for worker in continuation.absent:
            answer, (_, since) = continuation.reports.alive.get(worker), self._since.get(worker, (None, now))
            is_there = answer is not None and answer.number > self._number - _RECENT_QUESTIONS
            if answer is not None and is_there and answer.waits and now - since >= _STUCK_SECONDS:
                call = f"a call of workers of which one was lost, in {answer.place}"
                self._kill(worker, f"it has waited for {_STUCK_SECONDS:g} s in {call}")
                return
            if worker not in self._told[1]:
                self._told[1].add(worker)
                _LOGGER.warning(
                    "The others wait for worker %d (pid %d), to continue without one that is lost: it %s. (LS604)",
                    worker,
                    continuation.pids[worker],
                    f"is in {answer.place}" if answer is not None and is_there else "does not answer the launcher",
                )

    def _kill(self, worker: int, reason: str) -> None:
        self._asked.pop(worker, None)
        self._since.pop(worker, None)
        process = self._pool.workers[worker]
        if process.exit_code is None:
            self._pool.kill(process, f"by its launcher, because {reason}")


@final
class Supervision:
    def __init__(self, launch: RunningLaunch) -> None:
        self._pool = launch.pool
        self._continuation = launch.continuation
        self._scaling = Scaling(launch)
        self._fencing = Fencing(launch)
        self._folder = launch.elastic.folder
        self._needs_every_result = launch.needs_every_result
        self._gone: set[int] = set()
        self._failed_at = self._deadline = math.inf

    def wait(self) -> list[Worker]:
        """Wait until every worker of the run has returned; return those, in rank order, or raise the failure."""
        with ExitStack() as stack:
            control = self._open_control(stack)
            while not all(worker.has_returned for worker in self._members()):
                next_look = min(self._scaling.next_look, self._fencing.next_look)
                self._pool.handle_events(min(self._deadline, self._continuation.next_answer, next_look))
                self._receive_reports()
                self._scaling.answer_loading_losses()
                self._fencing.advance()
                self._take_ends()
                if time.monotonic() >= self._deadline or (self._failed() and not self._running()):
                    self._pool.failure = self._error()
                    raise self._pool.failure
                if self._deadline == math.inf:
                    self._scaling.advance()
                if control is not None:
                    control.tell()
            self._continuation.refuse()
            self._continuation.announce_end()
        self._scaling.finish()
        if self._needs_every_result:
            self._tell_of_missing_results()
        return [worker for worker in self._ever() if worker.has_returned]

    def _open_control(self, stack: ExitStack) -> ControlSocket | None:
        if self._folder is None:
            return None
        try:
            control = ControlSocket(
                Path(self._folder), self._pool, self._scaling.begin_request, self._scaling.request_result
            )
        except OSError as error:
            _LOGGER.warning("`lockstep scale` cannot change this run: %s. (LS603)", error)
            return None
        stack.callback(control.close)
        return control

    def _receive_reports(self) -> None:
        self._continuation.receive_reports()
        reports = self._continuation.reports
        reports.over.update(each.number for each in self._members() if each.has_returned)
        raised, reports.raised = reports.raised, []
        for number, threads in raised:
            self._pool.workers[number].hear_raised(threads)

    def _members(self) -> list[Worker]:
        return [self._pool.workers[number] for number in self._continuation.generation.workers]

    def _ever(self) -> list[Worker]:
        return [self._pool.workers[number] for number in self._continuation.members]

    def _running(self) -> list[Worker]:
        return [worker for worker in self._members() if worker.end is End.NOT_YET]

    def _failed(self) -> list[Worker]:
        """Return members that have failed, or that are lost and without which the others cannot continue."""
        return [
            worker
            for worker in self._pool.workers.values()
            if worker.number not in self._gone and worker.number in self._continuation.needed and worker.has_failed
        ]

    def _take_ends(self) -> None:
        ended = [worker for worker in self._pool.workers.values() if self._is_gone(worker)]
        needed = [worker for worker in ended if self._is_needed(worker)]
        own = [worker for worker in needed if worker.end is End.FAILED and not self._continuation.is_new(worker.number)]
        done = [worker for worker in ended if worker not in needed]
        if own:
            self._continuation.refuse()
        elif needed and not self._pool.is_terminating and self._continue_without(needed):
            done += needed
            self._failed_at = self._deadline = math.inf
        else:
            own = [worker for worker in needed if not worker.has_returned]
        if own:
            # Asked for again each time: what a script has written may come after its end.
            self._failed_at = min(self._failed_at, time.monotonic())
            failed = self._failed() or own
            asked = [*failed, *self._running()]
            is_sure = not any(worker.may_tell_of_failure for worker in asked)
            self._deadline = self._failed_at + patience_after(failed, is_sure=is_sure)
        for worker in done:
            self._gone.add(worker.number)
            if worker.exit_code is None:  # a new worker that has failed to join, and has not ended yet
                self._pool.kill(worker, "by its launcher, because it has failed")
            self._scaling.take_end(worker)
            self._pool.release(worker)

    def _is_gone(self, worker: Worker) -> bool:
        """Return whether a worker has ended, or will, and nothing has followed from it yet."""
        if worker.number in self._gone or worker.end is End.EXITED:
            return False
        is_done = worker.end is End.FAILED or (worker.has_returned and not self._is_needed(worker))
        return worker.exit_code is not None or is_done

    def _is_needed(self, worker: Worker) -> bool:
        if worker.end is End.LEFT:
            return worker.number in self._continuation.generation.workers
        return worker.number in self._continuation.needed

    def _continue_without(self, lost: list[Worker]) -> bool:
        """Let the others continue, if they can; two workers must never have one rank, so these have ended before."""
        for worker in lost:
            if worker.exit_code is None:  # a new worker that raised
                self._pool.kill(worker, "by its launcher, because it has failed")
        return self._continuation.continue_without({worker.number: _describe(worker) for worker in lost})

    def _error(self) -> Exception:
        """Return the error; those without which the others continued are its cause if all others follow from a loss."""
        failed = [worker for worker in self._ever() if worker.has_failed]
        earlier = [worker for worker in failed if worker.number in self._gone]
        present = [worker for worker in failed if worker not in earlier]
        if all(worker.is_consequence() for worker in present):
            earlier, present = [], failed
        failures = tuple(worker.failure() for worker in first_failures_first(present))
        names = ", ".join(f"worker {worker.number} ({worker.describe_end()})" for worker in earlier)
        before = f"Before that, the others had continued without {names}." if earlier else ""
        reasons = "\n\n".join(filter(None, (self._continuation.stop_reason, before)))
        message = describe_failures(failures)
        error = WorkerFailedError(f"{message}\n\n{reasons}" if reasons else message, failures)
        error.__cause__ = failures[0].error
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


def first_failures_first(workers: Iterable[AnyWorker]) -> list[AnyWorker]:
    """Sort workers that have failed: those that have failed because another has come last."""
    return sorted(workers, key=lambda worker: (worker.is_consequence(), worker.failed_at()))


def patience_after(failed: Sequence[Worker], *, is_sure: bool) -> float:
    """Return how long to wait, after these failures, for one that happened before them (seconds).

    Little where none can have, which the caller knows (`is_sure`), or one was killed by SIGKILL: no failure of another
    worker leads to that. Long while each is a consequence of another worker's, which is not known yet.
    """
    if any(worker.exit_code == -signal.SIGKILL for worker in failed):
        return SURE_SECONDS
    if all(worker.is_consequence() for worker in failed):
        return ROOT_CAUSE_SECONDS
    return SURE_SECONDS if is_sure else EARLIER_FAILURE_SECONDS


def _describe(worker: Worker) -> str:
    if worker.end is End.FAILED and (failure := worker.failure()).traceback:
        return f"failed while it joined: {failure.reason}"
    if worker.end is End.LEFT:
        return "has left"
    return worker.describe_end()
