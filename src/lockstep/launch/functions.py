"""Workers that call a function: how their processes start, and what they report of their end."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from lockstep.devices import Device
from lockstep.devices.choose import CPU
from lockstep.errors import WorkerFailure
from lockstep.launch.environment import function_variables
from lockstep.launch.exits import CONSEQUENCES
from lockstep.launch.messages import Report, WorkerTask, load_error, read_report, send_task
from lockstep.launch.signals import sigint_held_back, signals_blocked
from lockstep.launch.template import Process, WorkerTemplate
from lockstep.launch.worker_pool import End, Worker, WorkerPool
from lockstep.processes.stop_signals import STOP_SIGNALS
from lockstep.settings import read_settings

NUM_DESCRIPTORS_PER_WORKER = 5
"""How many the launcher needs for each worker, at most: two pipes, its process, both ends of a channel."""
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


@final
class FunctionWorker(Worker):
    """A worker that reports its result or its error on a pipe, which this owns."""

    def __init__(self, number: int, device: Device, process: Process, pool: WorkerPool, pipe: int) -> None:
        super().__init__(number, device, process)
        self.report: Report | None = None
        self._pool = pool
        self._pipe = pipe
        self._received = bytearray()
        self._closed_at = math.inf
        os.set_blocking(pipe, False)
        pool.watch(pipe, self._receive)

    @property
    def due(self) -> float:
        if self.exit_code is not None or self.report is not None or self.is_given_up:
            return math.inf
        return self._closed_at + _CLOSED_SECONDS

    @property
    def may_tell_of_failure(self) -> bool:
        return self.report is None

    def look_own(self) -> None:
        if self.report is None:
            self._receive()
        self.is_given_up |= time.monotonic() >= self.due

    def said_end(self) -> End | None:
        if self.report is not None:
            if self.report.has_left:
                return End.LEFT
            return End.FINISHED if self.report.result is not None else End.FAILED
        return None

    def said_failed_at(self) -> float | None:
        if self.report is not None:
            return self.report.time
        return self._closed_at if self.exit_code is None else None

    def failure(self) -> WorkerFailure:
        report = self.report
        if report is None:
            return WorkerFailure(rank=self.number, reason=self.describe_end(), traceback="", error=None)
        error = load_error(report)
        return WorkerFailure(rank=self.number, reason=report.reason, traceback=report.traceback, error=error)

    def describe_end(self) -> str:
        if self.exit_code is None:
            return "closed its pipe to the launcher and still runs"
        silent = " without reporting a result or an error" if self.exit_code >= 0 else ""
        return self.describe_exit() + silent

    def is_consequence(self) -> bool:
        return self.report is not None and isinstance(load_error(self.report), CONSEQUENCES)

    def close(self) -> None:
        if self._pipe >= 0:
            self._pool.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _receive(self) -> bool:
        """Read what the worker has written; return False when nothing more will come."""
        is_open = False
        try:
            while self._pipe >= 0 and (chunk := os.read(self._pipe, 1 << 20)):
                self._received += chunk
        except BlockingIOError:
            is_open = True
        self.report = read_report(self._received)
        if not is_open:
            self._closed_at = min(self._closed_at, time.monotonic())
        return is_open and self.report is None


@final
class FunctionWorkers:
    """Starts workers that call a function: forked of the template where they can be, else new interpreters.

    `first` is the task of the workers that the launch begins with; later ones are to join those. `reserved_port` is the
    descriptor of a socket that holds a port for them. `can_stop`: they handle requests to stop, which are signals;
    until they do, these are blocked.
    """

    def __init__(
        self, first: WorkerTask, template: WorkerTemplate | None, reserved_port: int, *, can_stop: bool
    ) -> None:
        self._first = first
        self._template = template
        self._reserved_port = reserved_port
        self._blocked = STOP_SIGNALS if can_stop else ()
        # Every worker reads from this pipe, and only the launcher can write: so its end is that of the launcher.
        self._launcher_pipe, self._launcher_end = os.pipe()

    @contextlib.contextmanager
    def signals_held_back(self) -> Iterator[None]:
        with sigint_held_back(), signals_blocked(self._blocked):
            yield

    def start(self, pool: WorkerPool, number: int, device: Device, channel: int) -> FunctionWorker:
        task = replace(self._first, worker=number, rank=number, device=device.name, folder=pool.folder)
        if number >= self._first.world_size:
            task = replace(task, rank=0, world_size=1, is_joiner=True)
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        descriptors = (down_read, up_write, self._launcher_pipe, channel, self._reserved_port)
        variables = {**function_variables(task), **device.variables()}
        try:
            process: Process | None = None
            if self._template is not None and device == CPU:
                process = self._template.fork(descriptors, variables)
            if process is None:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    # -P: the current directory, where others may write, is not searched for the modules of _BOOTSTRAP.
                    [sys.executable, "-P", "-c", _BOOTSTRAP, *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=read_settings().for_worker(variables, seed=task.seed),
                    start_new_session=True,
                )
        except BaseException:
            os.close(down_write)
            os.close(up_read)
            raise
        finally:
            os.close(down_read)
            os.close(up_write)
        # Another thread, because a worker reads when it has imported torch: the others are started before that.
        threading.Thread(target=_send, args=(down_write, task), name=f"task of worker {number}", daemon=True).start()
        return FunctionWorker(number, device, process, pool, up_read)

    def let_exit(self, num_workers: int) -> None:
        """Let the workers that have reported a result leave their groups and exit; so many were started."""
        os.write(self._launcher_end, b"." * num_workers)

    def close(self) -> None:
        os.close(self._launcher_pipe)
        os.close(self._launcher_end)


def _send(task_pipe: int, task: WorkerTask) -> None:
    # A broken pipe: the worker has ended already, and its exit code is reported.
    with contextlib.suppress(BrokenPipeError), os.fdopen(task_pipe, "wb") as stream:
        send_task(stream, sys.path, task)
