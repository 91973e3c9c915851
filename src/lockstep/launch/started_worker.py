"""One worker process of a launched function, as the launcher sees it, and how it ended."""

import contextlib
import enum
import os
import signal
import time
from typing import final

from lockstep.errors import WorkerFailure
from lockstep.launch.exits import EARLIER_FAILURE_SECONDS, KILLED_SECONDS, UNKNOWN_KILLER, describe_exit
from lockstep.launch.messages import Report, WorkerTask, is_consequence, load_error, read_report
from lockstep.launch.sessions import exit_code
from lockstep.launch.template import Process

_CLOSED_SECONDS = 2.0
"""How long a worker may run on after it has closed its pipe to the launcher."""
_EXIT_POLL_SECONDS = 0.01
"""How often to check whether a worker that is about to end has ended."""


class End(enum.Enum):
    """How a worker stands with its function.

    [Note: what is a loss] A worker that a signal has ended is lost, whichever signal it is: `kill -9`, the kernel where
    memory runs out, a bus error where a disk or memory fails, a crash in native code. The others can continue. A worker
    that raised, or exited with an exit code, has ended by its own code. The next worker would end in the same way, so
    that is an error of the launch.
    """

    NOT_YET = "runs"
    FINISHED = "has returned a result"
    LEFT = "has left the others between two steps, because it was asked to"
    LOST = "was ended by a signal"
    FAILED = "raised, or exited"


@final
class StartedWorker:
    """One worker process.

    `exit_code` is -N for signal N, None while it runs. `may_leave`: it was sent a generation in which it has no rank.
    `killer` and `place`: who has killed it, and where it crashed; empty where that is not known.
    """

    def __init__(self, task: WorkerTask, process: Process, task_pipe: int, report_pipe: int) -> None:
        self.number = task.worker
        self.task = task
        self.process = process
        self.task_pipe = task_pipe
        self.report_pipe = report_pipe
        self.report: Report | None = None
        self.exit_code: int | None = None
        self.may_leave = False
        self.killer = ""
        self.place = ""
        self._received = bytearray()
        self._ended_at: float | None = None
        self._closed_at: float | None = None
        os.set_blocking(report_pipe, False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def receive(self) -> bool:
        """Read what the worker has written; return False when nothing more will come."""
        is_open = self._read()
        self.report = read_report(self._received)
        if self.report is None and not is_open and self._closed_at is None:
            self._closed_at = time.monotonic()
        return is_open and self.report is None

    def look(self) -> bool:
        """Look whether the process has ended; return True if it has. Its report, if any, is read before.

        This does not wait for the end of the pipe: a process that the worker started may hold it open.
        """
        if self.exit_code is None:
            self.exit_code = exit_code(self.process)
            if self.exit_code is not None:
                if self.report is None:
                    self.receive()
                self._ended_at = time.monotonic()
        return self.exit_code is not None

    def kill(self) -> bool:
        """Kill the process and wait until it has ended; return whether it has.

        A process in a system call that does not return ends only with that. It runs no instruction of its own any more.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_for_exit(self.process, time.monotonic() + KILLED_SECONDS)
        return self.look()

    @property
    def closed_until(self) -> float:
        """When a worker that has closed its pipe to the launcher, and runs on, counts as failed."""
        is_closed = self._closed_at is not None and self.exit_code is None and self.report is None
        return (self._closed_at or 0.0) + _CLOSED_SECONDS if is_closed else float("inf")

    @property
    def end(self) -> End:
        if self.report is not None:
            if self.report.has_left:
                return End.LEFT
            return End.FINISHED if self.has_returned else End.FAILED
        if self.exit_code is None:
            return End.FAILED if time.monotonic() >= self.closed_until else End.NOT_YET
        if self.may_leave and self.exit_code == 0:
            return End.LEFT
        return End.LOST if self.exit_code < 0 else End.FAILED

    @property
    def has_returned(self) -> bool:
        return self.report is not None and self.report.result is not None

    def is_consequence(self) -> bool:
        return self.report is not None and is_consequence(self.report)

    def describe_failure(self) -> tuple[float, WorkerFailure]:
        """Return when the worker failed, and how.

        The launcher notices a worker that ended without a report when the kernel has ended it. About then the other
        workers lose their connections to it and fail too. So its time is set a little earlier, before theirs.
        """
        report = self.report
        if report is None:
            failure = WorkerFailure(rank=self.number, reason=self.describe_end(), traceback="", error=None)
            return (self._ended_at or self._closed_at or 0.0) - EARLIER_FAILURE_SECONDS, failure
        return report.time, WorkerFailure(
            rank=self.number, reason=report.reason, traceback=report.traceback, error=load_error(report)
        )

    def describe_end(self) -> str:
        if self.exit_code is None:
            return "closed its pipe to the launcher and still runs"
        return self.describe_exit() + (" without reporting a result or an error" if self.exit_code >= 0 else "")

    def describe_exit(self) -> str:
        """Return how the process has ended, whatever it has reported."""
        return describe_exit(self.exit_code or 0, killer=self.killer or UNKNOWN_KILLER, place=self.place)

    def close(self) -> None:
        for descriptor in (self.report_pipe, self.task_pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self.report_pipe = self.task_pipe = -1

    def _read(self) -> bool:
        """Read what there is; return False at the end of the pipe."""
        if self.report_pipe < 0:
            return False
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.report_pipe, 1 << 20):
                self._received += chunk
            return False
        return True


def wait_for_exit(process: Process, deadline: float) -> int | None:
    """Return how a process ended; None if it has not by the deadline."""
    while (code := exit_code(process)) is None and time.monotonic() < deadline:
        time.sleep(_EXIT_POLL_SECONDS)
    return code
