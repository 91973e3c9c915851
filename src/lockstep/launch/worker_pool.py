"""The processes of a launched function: starting them, waiting for their reports, ending them."""

import contextlib
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
from lockstep.doctor.stacks import crash_place
from lockstep.errors import UsageError, WorkerFailedError
from lockstep.launch.environment import place_variables
from lockstep.launch.exits import (
    GRACE_SECONDS,
    SLOW_END_SECONDS,
    TEARDOWN_SECONDS,
    describe_waiting,
    name_killer,
    read_oom_kills,
)
from lockstep.launch.messages import WorkerTask, send_task
from lockstep.launch.rendezvous import LOOPBACK_INTERFACE
from lockstep.launch.sessions import Sessions, exit_code, wake
from lockstep.launch.signals import sigint_held_back, signals_blocked
from lockstep.launch.started_worker import End, StartedWorker
from lockstep.launch.template import Process, WorkerTemplate
from lockstep.processes.stop_signals import FORWARDED_SIGNAL, STOP_SIGNALS
from lockstep.recording import NULL_WORKER_RECORDER, EventKind
from lockstep.settings import LAUNCHED, read_settings

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
        self._kills = read_oom_kills()
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
            variables = {**_variables(task), **device.variables()}
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
        descriptor = os.pidfd_open(worker.pid) if sys.platform == "linux" else _CLOSED
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
            kills = read_oom_kills()
            worker.killer, self._kills = name_killer(self._kills, kills), kills
        worker.place = crash_place(self.recorder.directory, worker.pid, worker.exit_code or 0)
        how = self.recorder.text(worker.describe_exit())
        self.recorder.mark(EventKind.WORKER_ENDED, worker.number, worker.pid, how)
        return False


def _send_task(worker: StartedWorker) -> None:
    task_pipe, worker.task_pipe = worker.task_pipe, _CLOSED
    # A broken pipe: the worker has ended already, and its exit code is reported.
    with contextlib.suppress(BrokenPipeError), os.fdopen(task_pipe, "wb") as stream:
        send_task(stream, sys.path, worker.task)


def _name_running(workers: Sequence[int]) -> str:
    names = ", ".join(map(str, workers))
    return f"worker {names} still runs" if len(workers) == 1 else f"workers {names} still run"


def _variables(task: WorkerTask) -> dict[str, str]:
    """Return the variables that torchrun sets, for code that reads them, and keep Gloo on loopback."""
    threads = str(task.threads)
    port = task.master_port
    place = place_variables(rank=task.rank, local_rank=task.worker, world_size=task.world_size, port=port)
    own = {LAUNCHED: str(port), "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    return {**place, **own, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _sleep(seconds: float) -> bool:
    """Wait, and return False, never to kill at once: a second Ctrl-C raises KeyboardInterrupt here instead."""
    time.sleep(seconds)
    return False
