"""Ending workers that do not answer, so that the others can continue without them.

The launcher asks each member in turn; the thread that reads the worker's channel answers. A process that is stopped, or
hangs in the kernel or in native code that holds Python's lock, does not. It is killed, and has ended, before the others
hear of it: two workers never have one rank, also when the process would have gone on a moment later.
"""

import time
from collections.abc import Callable
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.launch.continuation import Continuation
from lockstep.launch.worker_pool import WorkerPool

_QUESTIONS = 5
"""So many questions are asked in the time after which a worker is ended."""


@final
class Fencing:
    """Asks the members of a run whether they are there.

    Args:
        pool: The processes.
        server: Their channels.
        continuation: Knows who is in, and what they answer.
        seconds: How long a worker may be silent; infinity for any time.
        clock: Returns the time, in seconds.
    """

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
        self._pause = seconds / _QUESTIONS
        self._clock = clock
        self._number = 0
        self._asked: dict[int, list[int]] = {}
        self.next_look = clock() + self._pause

    def advance(self) -> None:
        """Ask, and end workers that have left every question of the last `seconds` unanswered."""
        now = self._clock()
        if now < self.next_look:
            return
        was_away = now - self.next_look > self._pause  # this process was stopped itself, or the machine slept
        self.next_look = now + self._pause
        self._number += 1
        reports = self._continuation.reports
        for worker in self._continuation.generation.workers:
            if worker not in reports.ready:
                continue  # it is still importing
            answered = reports.alive.get(worker, (0, None))[0]
            asked = [] if was_away else [each for each in self._asked.get(worker, []) if each > answered]
            if len(asked) > _QUESTIONS:
                reason = f"by its launcher, because it has not answered for {self._seconds:g} s"
                self._pool.kill(self._pool.workers[worker], reason)
                self._asked.pop(worker, None)
                continue
            self._asked[worker] = [*asked, self._number]
            self._server.send(worker, {"event": "ping", "number": self._number})
