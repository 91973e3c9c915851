"""Waits of Gloo's messages that can be ended.

Gloo never ends the wait for a message of which a part has arrived when the connection ends (`Pair::signalException`
reports the error to pending operations, and leaves out the one that is being read or written); and a wait with a
timeout closes the group when it passes. So where a launcher may replace the workers, another thread waits. It is left
alone if the call is ended, and ends at the group's timeout. Its connection is closed by then, so nothing is written.
"""

import queue
import threading
from typing import Any, final

from torch.distributed import Work

from lockstep.errors import GroupError
from lockstep.processes.ending import start_thread_left_alone

_Outcome = queue.SimpleQueue[bool | BaseException]


@final
class InterruptibleWaits:
    """The waits of one group, each made by a thread that has no other at that time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[tuple[Any, _Outcome] | None]] = []
        self._waiting: set[_Outcome] = set()
        self._error: GroupError | None = None

    def wait(self, work: Work) -> bool:
        outcome: _Outcome = queue.SimpleQueue()
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._waiting.add(outcome)
            thread = self._idle.pop() if self._idle else self._start()
        thread.put((work, outcome))
        try:
            found = outcome.get()
        finally:
            with self._lock:
                self._waiting.discard(outcome)
        if isinstance(found, GroupError):
            raise found.with_traceback(None)
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self, error: GroupError) -> None:
        """Let all waits raise `error`, those to come too, and end the threads (any thread)."""
        with self._lock:
            self._error = error
            waiting, idle, self._idle = list(self._waiting), self._idle, []
        for outcome in waiting:
            outcome.put(error)
        for thread in idle:
            thread.put(None)

    def _start(self) -> "queue.SimpleQueue[tuple[Any, _Outcome] | None]":
        calls: queue.SimpleQueue[tuple[Any, _Outcome] | None] = queue.SimpleQueue()
        start_thread_left_alone(self._serve, [calls], name="lockstep-waits")
        return calls

    def _serve(self, calls: "queue.SimpleQueue[tuple[Any, _Outcome] | None]") -> None:
        while (call := calls.get()) is not None:
            work, outcome = call
            found: bool | BaseException
            try:
                found = bool(work.wait())
            except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is read
                found = error
            del work, call
            with self._lock:
                if self._error is None:
                    self._idle.append(calls)
                else:
                    calls.put(None)
            outcome.put(found)
            del found, outcome
