"""Ending workers that hang, so that the others can continue without them.

The launcher asks each member in turn, also one that is to leave after the step under way; the thread that reads the
worker's channel answers, and says where the main thread stands. Two kinds of workers are ended:

    is silent     the process is stopped, or hangs in the kernel or in native code that holds Python's lock
    keeps others  its main thread neither completes a call of the trainer nor waits for others, while another worker
    waiting       waits all that time: an endless loop or a disk that hangs, in the loss or in a save

A worker is killed, and has ended, before the others hear of it: two workers never have one rank, also when the process
would have gone on a moment later. A new worker that has not joined is ended when it is silent for a few seconds,
whatever the options say: nothing is lost with it, and the others would wait for it. So is a member that does not come
to the next generation after a loss, because it still waits in a call of the last one: that call never ends. If it is in
other code, a line tells where.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.launch.continuation import Answer, Continuation
from lockstep.launch.worker_pool import WorkerPool

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


@dataclass(slots=True)
class _Seen:
    answer: Answer
    since: float


@final
class Fencing:
    """Asks the workers of a run whether they are there; `seconds` of silence are allowed, or infinity."""

    def __init__(
        self,
        pool: WorkerPool,
        server: ChannelServer,
        continuation: Continuation,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._server = server
        self._continuation = continuation
        self._seconds = seconds
        self._clock = clock
        self._number = 0
        self._asked: dict[int, list[tuple[int, float]]] = {}
        self._seen: dict[int, _Seen] = {}
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
            self._seen.clear()
            self._continuation.reports.alive.clear()
        self._next_look = now + pause
        self._number += 1
        for worker, seconds in watched.items():
            if self._is_silent(worker, seconds, now):
                self._kill(worker, f"it has not answered for {seconds:g} s")
            else:
                self._server.send(worker, {"event": "ping", "number": self._number})
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
        needed = self._continuation.needed
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in needed}
        for worker in needed:
            answer = self._continuation.reports.alive.get(worker)
            if answer is None or worker not in self._continuation.reports.ready:
                continue
            seen = self._seen.get(worker)
            if seen is None or (seen.answer.waits, seen.answer.calls) != (answer.waits, answer.calls):
                seen = _Seen(answer, now)
            self._seen[worker] = _Seen(answer, seen.since)

    def _end_those_that_keep_others_waiting(self, now: float) -> None:
        long = [(worker, seen.answer) for worker, seen in self._seen.items() if now - seen.since >= self._seconds]
        # A new worker waits for the next step, however long the others take for this one.
        waiting = any(answer.waits and not self._continuation.is_new(worker) for worker, answer in long)
        for worker, answer in long if waiting else ():
            if not answer.waits:
                said = f"others have waited for it for {self._seconds:g} s: it was in {answer.place}"
                self._kill(worker, said)

    def _tell_of_absent(self, now: float) -> None:
        """Tell of members that do not come to the next generation, and end one that waits in the last one."""
        continuation = self._continuation
        if self._told[0] != continuation.generation.number:
            self._told = continuation.generation.number, set()
        for worker in continuation.absent:
            seen = self._seen.get(worker)
            is_there = seen is not None and seen.answer.number > self._number - _RECENT_QUESTIONS
            if seen is not None and is_there and seen.answer.waits and now - seen.since >= _STUCK_SECONDS:
                call = f"a call of workers of which one was lost, in {seen.answer.place}"
                self._kill(worker, f"it has waited for {_STUCK_SECONDS:g} s in {call}")
                return
            if worker not in self._told[1]:
                self._told[1].add(worker)
                _LOGGER.warning(
                    "The others wait for worker %d (pid %d), to continue without one that is lost: it %s. (LS604)",
                    worker,
                    continuation.pids[worker],
                    f"is in {seen.answer.place}" if seen is not None and is_there else "does not answer the launcher",
                )

    def _kill(self, worker: int, reason: str) -> None:
        self._asked.pop(worker, None)
        self._seen.pop(worker, None)
        process = self._pool.workers[worker]
        if process.exit_code is None:
            self._pool.kill(process, f"by its launcher, because {reason}")
