"""The processes of a launched function: starting them, waiting for their reports, ending them."""

import contextlib
import enum
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.devices import Device
from lockstep.devices.choose import CPU
from lockstep.errors import UsageError, WorkerFailedError, WorkerFailure
from lockstep.launch.environment import function_variables
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
from lockstep.launch.messages import Report, WorkerTask, is_consequence, load_error, read_report, send_task
from lockstep.launch.sessions import Sessions, exit_code, record_end, wake
from lockstep.launch.signals import sigint_held_back, signals_blocked
from lockstep.launch.template import Process, WorkerTemplate
from lockstep.processes.host import open_process
from lockstep.processes.stop_signals import FORWARDED_SIGNAL, STOP_SIGNALS
from lockstep.recording import NULL_WORKER_RECORDER, EventKind
from lockstep.settings import read_settings

_LOGGER = logging.getLogger("lockstep")
NUM_DESCRIPTORS_PER_WORKER = 5
"""How many the launcher needs for each worker, at most: two pipes, its process, both ends of a channel."""
_POLL_SECONDS = 0.05
"""How often to check for workers that ended, on systems where the kernel does not show that on a descriptor."""
_CLOSED = -1
"""The value of a descriptor that is closed."""
# Collecting garbage among what torch's import makes, which all stays, would take a third of a worker's start and end.
_BOOTSTRAP = """
import gc, json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
down, *descriptors = map(int, sys.argv[1:])
stream = os.fdopen(down, "rb")
search_path = stream.readline()
if not search_path.endswith(b"\\n"):  # the launcher was interrupted before it sent it
    sys.exit(1)
sys.path[:] = json.loads(search_path)
gc.disable()
from lockstep.launch.worker import main
gc.freeze()
gc.enable()
main(stream, *descriptors)
"""
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
        deadline = time.monotonic() + KILLED_SECONDS
        while not (has_ended := self.look()) and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_SECONDS)
        return has_ended

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


@final
class WorkerPool:
    """The workers of one launch of a function, as processes.

    `can_stop`: they handle requests to stop, which are signals; until they do, these are blocked. `is_stopping`: they
    were sent a signal that stops them; `is_terminating`: it was SIGTERM. `failure`: why the launch has failed.
    `reserved_port` is the descriptor of a socket that holds a port for them.
    """

    def __init__(
        self, server: ChannelServer, template: WorkerTemplate | None, reserved_port: int, *, can_stop: bool
    ) -> None:
        self._server = server
        self._reserved_port = reserved_port
        self._template = template
        self._can_stop = can_stop
        self._sessions = Sessions()
        # Every worker reads from this pipe, and only the launcher can write: so its end is that of the launcher.
        self._launcher_pipe, self._launcher_end = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._exits: dict[int, int] = {}
        self._killers = KillerNames()
        self.workers: dict[int, StartedWorker] = {}
        self.devices: dict[int, Device] = {}
        self.recorder = NULL_WORKER_RECORDER
        self.is_stopping = self.is_terminating = False
        self.failure: Exception | None = None
        self.watch(server.report_descriptor, lambda: True)

    @property
    def folder(self) -> str:
        """A folder for temporary files of the workers; empty if there is none."""
        return self._sessions.folder

    def start(self, task: WorkerTask, device: Device) -> StartedWorker:
        """Start one worker, which waits for its task when it has imported torch."""
        with (
            sigint_held_back(),
            signals_blocked(STOP_SIGNALS if self._can_stop else ()),
            self._server.worker_end(task.worker) as channel,
        ):  # until `stop` knows the worker
            down_read, down_write = os.pipe()
            up_read, up_write = os.pipe()
            # -P: the current directory, where others may write, is not searched for the modules of _BOOTSTRAP.
            descriptors = (down_read, up_write, self._launcher_pipe, channel, self._reserved_port)
            command = [sys.executable, "-P", "-c", _BOOTSTRAP, *map(str, descriptors)]
            variables = {**function_variables(task), **device.variables()}
            try:
                process: Process | None = None
                if self._template is not None and device == CPU:
                    process = self._template.fork(descriptors, variables)
                if process is None:
                    process = subprocess.Popen(  # noqa: S603 - our own interpreter
                        command,
                        pass_fds=descriptors,
                        stdin=subprocess.DEVNULL,
                        env=read_settings().for_worker(variables, seed=task.seed),
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
            worker = self.workers[task.worker] = StartedWorker(task, process, down_write, up_read)
            self.devices[task.worker] = device
            self.recorder.mark(EventKind.WORKER_STARTED, task.worker, process.pid, 0)
            self.watch(up_read, worker.receive)
            self._watch_exit(worker)
            return worker

    def send_tasks(self) -> None:
        """Send each worker its task. All workers are started before this, so that they import at the same time."""
        for worker in self.workers.values():
            _send_task(worker)

    def send_task_later(self, worker: StartedWorker) -> None:
        """Send a worker its task from another thread: it reads when it has imported torch, and others may end first."""
        threading.Thread(target=_send_task, args=(worker,), name=f"task of worker {worker.number}", daemon=True).start()

    def watch(self, descriptor: int, call: Callable[[], bool]) -> None:
        """Call `call` in `handle_events` when the descriptor can be read, until it returns False."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def handle_events(self, until: float) -> None:
        """Wait for reports, ends of workers and other events, until a moment of the monotonic clock; handle them."""
        seconds = max(until - time.monotonic(), 0.0)
        if any(descriptor < 0 for descriptor in self._exits.values()):
            seconds = min(seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(None if seconds == float("inf") else seconds):
            if key.fd in self._selector.get_map() and not key.data():
                self.forget(key.fd)
        for number, descriptor in list(self._exits.items()):
            if descriptor < 0:
                self._look(self.workers[number])

    def ask_to_stop(self) -> None:
        self.is_stopping = True
        self._signal(FORWARDED_SIGNAL)

    def terminate(self) -> None:
        self.is_stopping = self.is_terminating = True
        self._refuse_to_leave()
        self._signal(signal.SIGTERM)

    def was_terminated(self) -> bool:
        """Return whether SIGTERM is the cause of all failures, of which there is at least one."""
        failed = [
            worker
            for worker in self.workers.values()
            if worker.end in {End.FAILED, End.LOST} and not worker.is_consequence()
        ]
        return bool(failed) and all(
            worker.report is None and exit_code(worker.process) == -signal.SIGTERM for worker in failed
        )

    def kill(self, worker: StartedWorker, killer: str) -> None:
        """Kill a worker, and wait until it has ended; `killer` says who and why: "by its launcher, because ..."."""
        worker.killer = killer
        worker.kill()
        self._look(worker)

    def release(self, worker: StartedWorker) -> None:
        """Free all that belongs to a worker that has ended: what it has started, its process id, its descriptors."""
        self._sessions.release(worker.process)
        self.forget(worker.report_pipe)
        worker.close()

    def let_exit(self) -> None:
        """Let the workers that have reported a result leave their groups and exit, and wait for that."""
        os.write(self._launcher_end, b"." * len(self.workers))
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

    def stop(self) -> None:
        """End every worker and all processes that workers have started, before this returns."""
        try:
            # Workers that handle SIGTERM as a request would not end by it.
            self._refuse_to_leave()
            first = signal.SIGKILL if self._can_stop else signal.SIGTERM
            self._sessions.end(first, GRACE_SECONDS, is_hurried=_sleep, tell=self._tell_of_failure)
        finally:  # also when a second Ctrl-C comes while this waits
            self._sessions.close()
            self._selector.close()
            for worker in self.workers.values():
                worker.close()
            for descriptor in (*self._exits.values(), self._launcher_pipe, self._launcher_end):
                if descriptor >= 0:
                    os.close(descriptor)

    def _tell_of_failure(self) -> None:
        """Log what the launch will raise when all workers have ended: that takes a while."""
        failure = self.failure
        cause = failure.failures[0].error if isinstance(failure, WorkerFailedError) and failure.failures else None
        if failure is not None and not isinstance(cause, UsageError):  # of bad input there is one message
            _LOGGER.warning("%s", describe_waiting(str(failure)))

    def _refuse_to_leave(self) -> None:
        """Let SIGTERM end workers that otherwise take it for a request to leave the others."""
        for number in list(self.workers):
            self._server.send(number, {"event": "stay"})

    def _signal(self, number: int) -> None:
        for worker in list(self.workers.values()):
            if exit_code(worker.process) is None:
                os.kill(worker.pid, number)
                wake(worker.pid)

    def _watch_exit(self, worker: StartedWorker) -> None:
        """Watch for the end of a process: the kernel shows it on a descriptor at once (Linux)."""
        descriptor = _CLOSED
        with contextlib.suppress(OSError):
            descriptor = open_process(worker.pid)
        self._exits[worker.number] = descriptor
        if descriptor >= 0:
            self.watch(descriptor, lambda: self._look(worker))

    def _look(self, worker: StartedWorker) -> bool:
        """Look whether a worker has ended; return False if it has."""
        if not worker.look():
            return True
        descriptor = self._exits.pop(worker.number, _CLOSED)
        if descriptor >= 0:
            self.forget(descriptor)
            os.close(descriptor)
        if not worker.killer:
            worker.killer = self._killers.name()
        code = worker.exit_code or 0
        worker.place = record_end(self.recorder, worker.number, worker.pid, code, worker.killer)
        return False


def _send_task(worker: StartedWorker) -> None:
    task_pipe, worker.task_pipe = worker.task_pipe, _CLOSED
    # A broken pipe: the worker has ended already, and its exit code is reported.
    with contextlib.suppress(BrokenPipeError), os.fdopen(task_pipe, "wb") as stream:
        send_task(stream, sys.path, worker.task)


def _name_running(workers: Sequence[int]) -> str:
    names = ", ".join(map(str, workers))
    return f"worker {names} still runs" if len(workers) == 1 else f"workers {names} still run"


def _sleep(seconds: float) -> bool:
    """Wait, and return False, never to kill at once: a second Ctrl-C raises KeyboardInterrupt here instead."""
    time.sleep(seconds)
    return False
