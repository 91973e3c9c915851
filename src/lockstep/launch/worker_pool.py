"""The processes of a launched function: starting them, waiting for their reports, ending them."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.devices import Device
from lockstep.errors import WorkerFailure
from lockstep.launch.continuation import Continuation, EndedWorker
from lockstep.launch.exits import describe_exit
from lockstep.launch.messages import Report, WorkerTask, read_report, send_task
from lockstep.launch.results import failed_error, is_consequence, load_error
from lockstep.launch.sessions import Sessions, exit_code
from lockstep.launch.signals import sigint_held_back, signals_blocked
from lockstep.launch.store import LOOPBACK_INTERFACE
from lockstep.processes.stop_signals import FORWARDED_SIGNAL, STOP_SIGNALS
from lockstep.settings import LAUNCHED, worker_environment

NUM_DESCRIPTORS_PER_WORKER = 4
"""How many the launcher needs for each worker, at most: two pipes, both ends of the channel while it starts."""
EARLIER_FAILURE_SECONDS = 0.5
"""After the first report of a failure: how long to wait for a report of one that happened before it."""
_ROOT_CAUSE_SECONDS = 5.0
"""The same, while every reported failure is a consequence of another worker's failure."""
_TERMINATE_SECONDS = 2.0
"""How long a worker may take to end after SIGTERM, before SIGKILL."""
_TEARDOWN_SECONDS = 30.0
"""How long a worker may take to tear down once all have reported, before SIGKILL."""
_POLL_SECONDS = 0.1
"""How often to check for workers that ended while their pipe is open: a process they started may hold it open."""
_EXIT_POLL_SECONDS = 0.01
"""How often to check whether a worker that is about to end has ended."""
_CLOSED = -1
"""The value of a descriptor that is closed."""
_BOOTSTRAP = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
down, up, life, channel = map(int, sys.argv[1:5])
stream = os.fdopen(down, "rb")
search_path = stream.readline()
if not search_path.endswith(b"\\n"):  # the launcher was interrupted before it sent it
    sys.exit(1)
sys.path[:] = json.loads(search_path)
from lockstep.launch.worker import main
main(stream, up, life, channel)
"""


@final
class StartedWorker:
    """One worker process, as the launcher sees it."""

    def __init__(self, task: WorkerTask, process: subprocess.Popen[bytes], task_pipe: int, report_pipe: int) -> None:
        self.rank = task.rank
        self.task = task
        self.process = process
        self.task_pipe = task_pipe
        self.report_pipe = report_pipe
        self.report: Report | None = None
        self._received = bytearray()
        self._ended_at: float | None = None

    def receive(self, *, has_ended: bool) -> bool:
        """Read what the worker has written; return True if it is complete, because the worker has reported or ended.

        This does not wait for the end of the pipe: a process that the worker started may hold it open.
        """
        is_over = has_ended
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.report_pipe, 1 << 20):
                self._received += chunk
            is_over = True
        self.report = read_report(self._received)
        if self.report is None and is_over:
            self._ended_at = time.monotonic()
        return self.report is not None or is_over

    def has_failed(self) -> bool:
        """Return whether the worker has reported an exception, or has ended without a report."""
        return self._ended_at is not None or (self.report is not None and self.report.result is None)

    def is_consequence(self) -> bool:
        """Return whether the worker reported an error that says that another worker failed."""
        return self.report is not None and is_consequence(self.report)

    def describe_failure(self) -> tuple[float, WorkerFailure]:
        """Return when the worker failed, and how.

        The launcher notices a worker that ended without a report when the kernel closes its pipe. About then the other
        workers lose their connections to it and fail too. So its time is set a little earlier, before theirs.
        """
        report = self.report
        if report is None:
            assert self._ended_at is not None
            code = wait_for_exit(self.process, time.monotonic() + _TERMINATE_SECONDS)
            if code is None:
                reason = "closed its pipe to the launcher and still runs"
            else:
                reason = describe_exit(code) + (" without reporting a result or an error" if code >= 0 else "")
            failure = WorkerFailure(rank=self.rank, reason=reason, traceback="", error=None)
            return self._ended_at - EARLIER_FAILURE_SECONDS, failure
        return report.time, WorkerFailure(
            rank=self.rank, reason=report.reason, traceback=report.traceback, error=load_error(report)
        )


@final
class WorkerPool:
    """The workers of one launch of a function, as processes.

    Args:
        launcher_pipe: The writing end of a pipe that every worker reads from. Only the launcher holds it, so the pipe
            ends when the launcher does. The launcher writes a byte for each worker when the workers may exit.
        server: Serves the workers' channels.
        can_stop: Whether the workers handle SIGTERM and SIGUSR1 as requests to save and stop.
    """

    def __init__(self, launcher_pipe: int, server: ChannelServer, *, can_stop: bool) -> None:
        self._launcher_pipe = launcher_pipe
        self._server = server
        self._can_stop = can_stop
        self._sessions = Sessions()
        self._workers: list[StartedWorker] = []
        self._lost: set[int] = set()
        self._may_exit = False

    def start(self, task: WorkerTask, device: Device, launcher_pipe: int) -> None:
        """Start one worker, which imports torch and then waits for its task."""
        with (
            sigint_held_back(),
            signals_blocked(STOP_SIGNALS if self._can_stop else ()),
            self._server.worker_end(task.rank) as channel,
        ):  # until `stop` knows the worker
            down_read, down_write = os.pipe()
            up_read, up_write = os.pipe()
            # -P: the current directory, where others may write, is not searched for the modules of _BOOTSTRAP.
            descriptors = (down_read, up_write, launcher_pipe, channel)
            command = [sys.executable, "-P", "-c", _BOOTSTRAP, *map(str, descriptors)]
            try:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    command,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=worker_environment({**_variables(task), **device.variables()}, seed=task.seed),
                    start_new_session=True,
                )
                self._sessions.adopt(process)
            except BaseException:
                os.close(down_write)
                os.close(up_read)
                raise
            finally:
                os.close(down_read)
                os.close(up_write)
            self._workers.append(StartedWorker(task, process, down_write, up_read))

    def send_tasks(self) -> None:
        """Send each worker its task. All workers are started before this, so that they import at the same time."""
        for worker in self._workers:
            task_pipe, worker.task_pipe = worker.task_pipe, _CLOSED
            # A broken pipe: the worker has ended already, and `wait` reports its exit code.
            with contextlib.suppress(BrokenPipeError), os.fdopen(task_pipe, "wb") as stream:
                send_task(stream, sys.path, worker.task)

    def ask_to_stop(self) -> None:
        """Send every worker the signal that requests it to save and stop."""
        self._signal(FORWARDED_SIGNAL)

    def terminate(self) -> None:
        """Send SIGTERM to every worker."""
        self._signal(signal.SIGTERM)

    def was_terminated(self) -> bool:
        """Return whether SIGTERM is the cause of all failures, of which there is at least one."""
        failed = [worker for worker in self._workers if worker.has_failed() and not worker.is_consequence()]
        return bool(failed) and all(
            worker.report is None and exit_code(worker.process) == -signal.SIGTERM for worker in failed
        )

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if exit_code(worker.process) is None:
                os.kill(worker.process.pid, number)

    def wait(self) -> list[Report]:
        """Wait until every worker has reported, and return the reports in rank order.

        Raises:
            WorkerFailedError: One failed.
        """
        deadline = math.inf
        continuation = Continuation(self._server, len(self._workers))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                os.set_blocking(worker.report_pipe, False)
                selector.register(worker.report_pipe, selectors.EVENT_READ, worker)
            while selector.get_map():
                if time.monotonic() >= deadline:
                    break
                readable = {key.data for key, _ in selector.select(_POLL_SECONDS)}
                ended = {key.data for key in selector.get_map().values() if exit_code(key.data.process) is not None}
                for worker in readable | ended:
                    if worker.receive(has_ended=worker in ended):
                        selector.unregister(worker.report_pipe)
                continuation.receive_reports()
                failed = self._failed()
                if failed and self._continue_without(failed, continuation):
                    deadline = math.inf
                    continue
                if failed:
                    are_consequences = all(worker.is_consequence() for worker in failed)
                    patience = _ROOT_CAUSE_SECONDS if are_consequences else EARLIER_FAILURE_SECONDS
                    deadline = min(deadline, time.monotonic() + patience)
        if self._failed():
            # With those without which the others have continued: what fails now may be a consequence of that.
            failed = [worker for worker in self._workers if worker.has_failed()]
            failures = [(worker.is_consequence(), *worker.describe_failure()) for worker in failed]
            failures.sort(key=lambda failure: failure[:2])
            raise failed_error(tuple(failure for *_, failure in failures))
        with contextlib.suppress(BrokenPipeError):  # all were killed after their reports
            os.write(self._launcher_pipe, b"." * len(self._workers))
        self._may_exit = True
        reports = {worker.rank: worker.report for worker in self._workers if worker.report is not None}
        return [reports[worker] for worker in continuation.generation.workers]

    def _failed(self) -> "list[StartedWorker]":
        """Return the workers that have failed, but for those without which the others continue."""
        return [worker for worker in self._workers if worker.has_failed() and worker.rank not in self._lost]

    def _continue_without(self, failed: "list[StartedWorker]", continuation: Continuation) -> bool:
        """Let the others continue without workers that have ended; return whether they can."""
        if any(worker.report is not None for worker in failed):
            continuation.refuse()
            return False  # an error of the function
        ended = [
            EndedWorker(worker=worker.rank, pid=worker.process.pid, reason=worker.describe_failure()[1].reason)
            for worker in failed
        ]
        for worker in failed:
            if exit_code(worker.process) is None:  # it has only closed its pipe: two workers must not have one rank
                os.kill(worker.process.pid, signal.SIGKILL)
        if not continuation.continue_without(ended):
            return False
        self._lost.update(each.worker for each in ended)
        return True

    def stop(self) -> None:
        """End every worker and all processes that workers have started, before this returns."""
        try:
            if self._may_exit:
                deadline = time.monotonic() + _TEARDOWN_SECONDS
                for worker in self._workers:
                    wait_for_exit(worker.process, deadline)
            # Workers that handle SIGTERM as a request would not end by it.
            first = signal.SIGKILL if self._can_stop else signal.SIGTERM
            self._sessions.end(first, _TERMINATE_SECONDS, is_hurried=_sleep)
        finally:  # also when a second Ctrl-C comes while this waits
            self._sessions.close()
            for worker in self._workers:
                os.close(worker.report_pipe)
                if worker.task_pipe != _CLOSED:
                    os.close(worker.task_pipe)
            os.close(self._launcher_pipe)


def _variables(task: WorkerTask) -> dict[str, str]:
    """Return the variables that torchrun sets, for code that reads them, and keep Gloo on loopback."""
    threads = str(task.threads)
    return {
        LAUNCHED: str(task.master_port),
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.master_port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


def wait_for_exit(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return how a process ended; None if it has not by the deadline."""
    while (code := exit_code(process)) is None and time.monotonic() < deadline:
        time.sleep(_EXIT_POLL_SECONDS)
    return code


def _sleep(seconds: float) -> bool:
    """Wait, and return False, never to kill at once: a second Ctrl-C raises KeyboardInterrupt here instead."""
    time.sleep(seconds)
    return False
