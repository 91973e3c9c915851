"""The workers of one launch as processes: one pool, for functions and for scripts.

What the two differ in is given to the pool: a `Starter`, which makes a kind of `Worker`, and how workers are stopped
(`Stopping`).

                       functions (functions.py)               scripts (scripts.py)
                       ------------------------               --------------------
    a process is       forked of the template, or a new       script_entry.py, which becomes the script
                       interpreter
    it is done when    it reports a result                    it exits with 0
    it has failed by   its report, else its end               its end, with the traceback that it wrote before
    stopped by         SIGTERM, or at once where it takes     SIGTERM, or SIGINT after Ctrl-C; at once after a
                       that for a request                     second signal

For both, the kernel shows the end of a process on a descriptor.
"""

import contextlib
import enum
import logging
import math
import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from lockstep.channel.server import ChannelServer
from lockstep.devices import Device
from lockstep.doctor.stacks import crash_place
from lockstep.errors import UsageError, WorkerFailedError, WorkerFailure
from lockstep.launch.exits import (
    EARLIER_FAILURE_SECONDS,
    GRACE_SECONDS,
    KILLED_SECONDS,
    SLOW_END_SECONDS,
    TEARDOWN_SECONDS,
    UNKNOWN_KILLER,
    KillerNames,
    describe_exit,
    describe_waiting,
)
from lockstep.launch.sessions import Sessions, exit_code, launch_recorded, wake
from lockstep.launch.template import Process
from lockstep.processes.ending import describe_held_up
from lockstep.processes.host import open_process
from lockstep.processes.stop_signals import FORWARDED_SIGNAL
from lockstep.recording import EventKind, WorkerRecorder

_LOGGER = logging.getLogger("lockstep")
_POLL_SECONDS = 0.05
"""How often to check for workers that ended, on systems where the kernel does not show that on a descriptor."""
_CLOSED = -1
_EXIT_POLL_SECONDS = 0.01
"""How often to check whether a worker that is about to end has ended."""


class End(enum.Enum):
    """How a worker stands with its function or script.

    [Note: what is a loss] A worker that a signal has ended is lost, whichever signal it is: `kill -9`, the kernel where
    memory runs out, a bus error where a disk or memory fails, a crash in native code. The others can continue. A worker
    that raised, or exited with an exit code, has ended by its own code. The next worker would end in the same way, so
    that is an error of the launch.
    """

    NOT_YET = "runs"
    FINISHED = "has returned a result, and runs until the others have"
    EXITED = "is a script that has exited with 0"
    LEFT = "has left the others between two steps, because it was asked to"
    LOST = "was ended by a signal"
    FAILED = "raised, or exited"


class Starter(Protocol):
    def signals_held_back(self) -> AbstractContextManager[None]:
        """Return the context in which a process starts, until the pool knows it."""

    def start(self, pool: "WorkerPool", number: int, device: Device, channel: int) -> "Worker":
        """Start a worker of the pool, which leads a session and inherits `channel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    first: signal.Signals = signal.SIGTERM
    grace_seconds: float = GRACE_SECONDS
    is_hurried: Callable[[float], bool]
    """Waits so many seconds; returns whether to kill them at once."""
    tell: Callable[[str], None]
    """Gets the failure, while the others end, if that takes a while."""


class Worker(ABC):
    """One worker process, with what it says of its own end.

    `exit_code` is -N for signal N, None while it runs. `may_leave`: it was sent a generation in which it has no rank.
    `is_given_up`: it has failed, though it still runs.
    `killer` and `place`: who has killed it, and where it crashed; empty where that is not known. `raised_at` and
    `held_up_by`: when its main thread has raised, of a script that said so, and what it says keeps it from ending.
    """

    def __init__(self, number: int, device: Device, process: Process) -> None:
        self.number = number
        self.device = device
        self.process = process
        self.exit_code: int | None = None
        self.ended_at = self.raised_at = math.inf
        self.may_leave = self.is_given_up = False
        self.killer = self.place = self.held_up_by = ""

    @property
    @abstractmethod
    def due(self) -> float:
        """When to `look_own` though the process runs on; infinity for never, and once it has ended."""

    @property
    @abstractmethod
    def may_tell_of_failure(self) -> bool:
        """Whether a failure may have happened of which the launcher will know only later."""

    @abstractmethod
    def look_own(self) -> None:
        """Take in what is known by now: the process has ended, or `due` is over."""

    @abstractmethod
    def said_end(self) -> End | None:
        """Return how it stands; None if its exit code alone says it."""

    @abstractmethod
    def said_failed_at(self) -> float | None:
        """Return when it failed; None if its process has ended without saying."""

    @abstractmethod
    def failure(self) -> WorkerFailure: ...

    @abstractmethod
    def describe_end(self) -> str: ...

    @abstractmethod
    def is_consequence(self) -> bool:
        """Return whether it says that it has failed because another worker has."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def end(self) -> End:
        if (said := self.said_end()) is not None:
            return said
        if self.exit_code is None:
            return End.FAILED if self.is_given_up else End.NOT_YET
        if self.may_leave and self.exit_code == 0:
            return End.LEFT
        return End.LOST if self.exit_code < 0 else End.FAILED

    @property
    def has_returned(self) -> bool:
        return self.end in {End.FINISHED, End.EXITED}

    @property
    def has_failed(self) -> bool:
        return self.end in {End.LOST, End.FAILED}

    def look(self) -> bool:
        """Look whether the process has ended; return True if it has. What it has said is taken in before.

        This does not wait for the end of a pipe: a process that the worker started may hold it open.
        """
        if self.exit_code is None:
            self.exit_code = exit_code(self.process)
            if self.exit_code is not None:
                self.look_own()
                self.ended_at = time.monotonic()
        return self.exit_code is not None

    def hear_raised(self, threads: Sequence[str]) -> None:
        """Take in that its main thread has raised; these threads are no daemons."""
        self.raised_at = time.monotonic()
        self.held_up_by = describe_held_up(threads)

    def kill(self) -> None:
        """Kill the process and wait until it has ended.

        A process in a system call that does not return ends only with that. It runs no instruction of its own any more.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_SECONDS
        while not self.look() and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_SECONDS)

    def failed_at(self) -> float:
        """Return when the worker failed.

        The launcher notices a worker that ended without saying why when the kernel has ended it. About then the other
        workers lose their connections to it and fail too. So its time is set a little earlier, before theirs.
        """
        said = self.said_failed_at()
        return self.ended_at - EARLIER_FAILURE_SECONDS if said is None else said

    def describe_exit(self) -> str:
        """Return how the process has ended, whatever it has said."""
        return describe_exit(self.exit_code or 0, killer=self.killer or UNKNOWN_KILLER, place=self.place)


@final
class WorkerPool:
    """The workers of one launch, as processes.

    `is_stopping`: they were sent a signal that stops them; `is_terminating`: it was SIGTERM. `failure`: why the launch
    has failed.
    """

    def __init__(self, server: ChannelServer, starter: Starter, stopping: Stopping, recorder: WorkerRecorder) -> None:
        self.server = server
        self._starter = starter
        self._stopping = stopping
        self._recorder = recorder
        self._sessions = Sessions()
        self._selector = selectors.DefaultSelector()
        self._exits: dict[int, int] = {}
        self._killers = KillerNames()
        self.workers: dict[int, Worker] = {}
        self.is_stopping = self.is_terminating = False
        self.failure: Exception | None = None
        self.watch(server.report_descriptor, lambda: True)

    @property
    def folder(self) -> str:
        return self._sessions.folder

    def start(self, number: int, device: Device) -> Worker:
        with self._starter.signals_held_back(), self.server.worker_end(number) as channel:
            worker = self._starter.start(self, number, device, channel)
            self._sessions.adopt(worker.process)
            self.workers[number] = worker
            self._recorder.mark(EventKind.WORKER_STARTED, number, worker.pid, 0)
            descriptor = _CLOSED
            with contextlib.suppress(OSError):
                descriptor = open_process(worker.pid)
                self.watch(descriptor, lambda: self.look(worker))
            self._exits[number] = descriptor
            return worker

    def watch(self, descriptor: int, call: Callable[[], bool]) -> None:
        """Call `call` in `handle_events` when the descriptor can be read, until it returns False."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def handle_events(self, until: float) -> None:
        """Wait for reports, ends of workers and other events, until a moment of the monotonic clock; handle them."""
        until = min(until, *(worker.due for worker in self.workers.values()))
        seconds = max(until - time.monotonic(), 0.0)
        if any(descriptor < 0 for descriptor in self._exits.values()):
            seconds = min(seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(None if seconds == math.inf else seconds):
            if key.fd in self._selector.get_map() and not key.data():
                self.forget(key.fd)
        for number, descriptor in list(self._exits.items()):
            if descriptor < 0:
                self.look(self.workers[number])
        for worker in self.workers.values():
            if worker.due <= time.monotonic():
                worker.look_own()

    def look(self, worker: Worker) -> bool:
        """Look whether a worker has ended; return False if it has."""
        if not worker.look():
            return True
        descriptor = self._exits.pop(worker.number, None)
        if descriptor is None:  # that is known
            return False
        if descriptor >= 0:
            self.forget(descriptor)
            os.close(descriptor)
        if not worker.killer:
            worker.killer = self._killers.name()
        worker.place = crash_place(self._recorder.directory, worker.pid, worker.exit_code or 0)
        how = self._recorder.text(worker.describe_exit())
        self._recorder.mark(EventKind.WORKER_ENDED, worker.number, worker.pid, how)
        return False

    def ask_to_stop(self) -> None:
        self.is_stopping = True
        self._signal(FORWARDED_SIGNAL)

    def terminate(self) -> None:
        self.is_stopping = self.is_terminating = True
        self._refuse_to_leave()
        self._signal(signal.SIGTERM)

    def was_terminated(self) -> bool:
        """Return whether SIGTERM is the cause of all failures, of which there is at least one."""
        failed = [worker for worker in self.workers.values() if worker.has_failed and not worker.is_consequence()]
        return bool(failed) and all(worker.end is End.LOST and worker.exit_code == -signal.SIGTERM for worker in failed)

    def kill(self, worker: Worker, killer: str) -> None:
        """Kill a worker, and wait until it has ended; `killer` says who and why: "by its launcher, because ..."."""
        worker.killer = killer
        worker.kill()
        self.look(worker)

    def release(self, worker: Worker) -> None:
        """Free all that belongs to a worker that has ended: what it has started, its process id, its descriptors."""
        self._sessions.release(worker.process)
        worker.close()

    def wait_for_exits(self) -> None:
        """Wait until the workers have exited that have reported a result and may leave their groups; kill the rest."""
        began = time.monotonic()
        for seconds in (SLOW_END_SECONDS, TEARDOWN_SECONDS):
            while self._exits and time.monotonic() < began + seconds:
                self.handle_events(began + seconds)
            if self._exits and seconds < TEARDOWN_SECONDS:
                _LOGGER.warning(
                    "Every worker has returned its result, but %s, %g s later. Unless the machine is busy, a "
                    "thread that is no daemon, or a handler of atexit, holds it up. It is killed after %g s. (LS605)",
                    _name_running(sorted(self._exits)),
                    seconds,
                    TEARDOWN_SECONDS,
                )

    def end(self, first: signal.Signals | None = None) -> None:
        """End every worker and all processes that workers have started, before this returns."""
        self._refuse_to_leave()
        how = self._stopping
        self._sessions.end(first or how.first, how.grace_seconds, how.is_hurried, tell=self._tell_of_failure)

    def close(self) -> None:
        try:
            self.end()
        finally:  # also when a second Ctrl-C comes while this waits
            self._sessions.close()
            for worker in self.workers.values():
                worker.close()
            self._selector.close()
            for descriptor in self._exits.values():
                if descriptor >= 0:
                    os.close(descriptor)

    def _tell_of_failure(self) -> None:
        """Tell what the launch will raise when all workers have ended: that takes a while."""
        failure = self.failure
        cause = failure.failures[0].error if isinstance(failure, WorkerFailedError) and failure.failures else None
        if failure is not None and not isinstance(cause, UsageError):  # of bad input there is one message
            self._stopping.tell(describe_waiting(str(failure)))

    def _refuse_to_leave(self) -> None:
        """Let SIGTERM end workers that otherwise take it for a request to leave the others."""
        for number in list(self.workers):
            self.server.send(number, {"event": "stay"})

    def _signal(self, number: int) -> None:
        for worker in list(self.workers.values()):
            if exit_code(worker.process) is None:
                os.kill(worker.pid, number)
                wake(worker.pid)


@contextlib.contextmanager
def open_pool(starter: Starter, stopping: Stopping, *, recording: Path | None, world_size: int) -> Iterator[WorkerPool]:
    """Make a pool, which is recorded until all its workers have ended, and at the end of the block."""
    with ExitStack() as stack:
        server = ChannelServer()
        stack.callback(server.close)
        recorder = stack.enter_context(launch_recorded(recording, world_size))
        with starter.signals_held_back():
            pool = WorkerPool(server, starter, stopping, recorder)
            stack.callback(pool.close)
        yield pool


def _name_running(workers: Sequence[int]) -> str:
    names = ", ".join(map(str, workers))
    return f"worker {names} still runs" if len(workers) == 1 else f"workers {names} still run"
