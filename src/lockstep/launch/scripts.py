"""`lockstep run`: start any program once per worker, as torchrun does on one host.

launcher                                           worker r
--------                                           --------
1 open the rendezvous: a channel to each worker, and for programs without Lockstep a port that the kernel picks
2 start the process in a session of its own   ->   script_entry.py: register with the guardian, become the script
3 forward its output                          <-   stdout, stderr
4 wait for exits and signals
5 after the first failure: wait a moment for an earlier one; then, or after a signal, stop the other workers
"""

import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import final

from lockstep.channel.server import ChannelServer
from lockstep.devices import Placement, count_cores
from lockstep.errors import WorkerFailure
from lockstep.launch.environment import (
    LOOPBACK_INTERFACE,
    NOTICE,
    device_variables,
    place_variables,
    share_cores,
    torchrun_variables,
    with_drop_in,
    with_folder,
)
from lockstep.launch.exits import (
    GRACE_SECONDS,
    RAISED_SECONDS,
    SLOW_END_SECONDS,
    UNKNOWN_KILLER,
    KillerNames,
    describe_exit,
    describe_failures,
    describe_waiting,
    exit_status,
    find_traceback,
    patience_after,
    says_another_failed,
)
from lockstep.launch.output import Relays, Tail, flush_own_output, log_path, make_log_directory, print_message
from lockstep.launch.rendezvous import Rendezvous, open_rendezvous
from lockstep.launch.restarts import Restarts
from lockstep.launch.sessions import Sessions, check_descriptors, exit_code, launch_recorded, record_end
from lockstep.launch.signals import SignalPipe
from lockstep.processes.host import FREED_MEMORY_VARIABLES
from lockstep.recording import EventKind, WorkerRecorder, new_recording
from lockstep.settings import LAUNCHED, RUN_ID, channel_variables, read_settings, recording_variable

_TRACEBACK_SECONDS = 5.0
"""If a worker ends later than this after its last traceback, it is assumed to have caught that exception."""
_DRAIN_SECONDS = 1.0
"""After a signal: how long the terminal may take to print the workers' output."""
_JOIN_SECONDS = 0.05
_NUM_LAST_LINES = 10
_STARTUP_FOLDER = str(Path(__file__).parents[1] / "torch_private" / "startup")
"""The folder of a `sitecustomize` that changes what torch does in the processes of a script."""
_NUM_DESCRIPTORS = 11
"""How many the launcher needs for each worker, at most: two pipes, two log files, its channel, and three for each of
two connections to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    program: tuple[str, ...]
    """Path of an executable, and its arguments up to and with the script."""
    arguments: tuple[str, ...]
    placement: Placement
    num_threads: int | None = None
    """CPU threads of each worker; None for OMP_NUM_THREADS, or, if that is not set, an equal share of the cores."""
    own_card_only: bool = False
    """Whether each worker sees only its own GPU, and has local rank 0."""
    local_rank_option: str = ""
    """The option that passes the local rank to the script: "--local-rank" or "--local_rank"; empty for none."""
    has_prefix: bool = True
    """Whether the lines of several workers begin with their rank."""
    log_dir: Path | None = None
    """The directory for log files of the workers' output; None for no log files."""
    drop_in: bool = False
    """Whether Python processes of the workers have Lockstep's classes in place of torch's."""
    num_restarts: int = 0
    """How often the workers were started before, for TORCHELASTIC_RESTART_COUNT."""
    max_restarts: int = 0
    """How often they may be started again after a failure; see `restarts.py`."""
    grace_seconds: float = GRACE_SECONDS
    """How long workers may take to end after the first signal, before they get SIGKILL."""

    @property
    def world_size(self) -> int:
        return len(self.placement.devices)

    @property
    def threads(self) -> str:
        """OMP_NUM_THREADS of each worker."""
        if self.num_threads is not None:
            return str(self.num_threads)
        return read_settings().num_threads() or str(share_cores(count_cores(), self.world_size))

    def describe(self) -> str:
        threads = "1 thread" if self.threads == "1" else f"{self.threads} threads"
        hint = f"\nhint: {self.placement.hint}" if self.placement.hint else ""
        notice = f"\n{NOTICE}" if self.drop_in else ""
        return f"devices: {self.placement.reason}; {threads} each ({count_cores()} cores){hint}{notice}"


@dataclass(frozen=True, slots=True)
class Ending:
    exit_code: int
    """The exit code of the command: 0 for success; the exit code of the worker that failed first, or 128 + N if signal
    N ended it; 75 if all workers have exited with 75 after a signal to the launcher."""
    message: str
    """The message for the user; empty after success."""
    is_failure: bool = False
    """Whether a worker has failed; not where a signal to the launcher has stopped the workers."""


def run_with_restarts(job: ScriptJob, tell: Callable[[str], None]) -> Ending:
    """Run a script, and start its workers again where one has failed. Main thread only.

    The logs of a restart are in a folder of their own, `restart-1`, in the log directory.
    """
    restarts = Restarts(job.max_restarts, tell)
    while True:
        folder, number = job.log_dir, len(restarts.reasons)
        if folder is not None and number:
            folder /= f"restart-{number}"
        ending = run_script(replace(job, log_dir=folder, num_restarts=number))
        if not ending.is_failure:
            return ending
        if not restarts.begin_another(ending.message, f"{ending.message}\n\n"):
            return replace(ending, message=ending.message + restarts.describe())


def run_script(job: ScriptJob) -> Ending:
    """Start the workers and wait for them; all have ended when this returns. Main thread only."""
    check_descriptors(job.world_size, _NUM_DESCRIPTORS)
    if job.log_dir is not None:
        make_log_directory(job.log_dir)
    flush_own_output()
    with ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        rendezvous = stack.enter_context(open_rendezvous(job.world_size))
        server = ChannelServer()
        stack.callback(server.close)
        recording = new_recording(None)
        recorder = stack.enter_context(launch_recorded(recording, job.world_size))
        variables = {} if recording is None else recording_variable(str(recording))
        pool = _ScriptWorkerPool(job, server, recorder, variables)
        stack.callback(pool.close)
        pool.start(rendezvous)
        stop = pool.wait(signals)
        pool.end(signals, stop)
        return pool.describe_end() if stop is None else pool.describe_stop(stop)


@final
class _ScriptWorker:
    def __init__(self, rank: int, process: subprocess.Popen[bytes], stderr: Tail | None) -> None:
        self.rank = rank
        self.process = process
        self.stderr = stderr
        self.exit_code: int | None = None
        self.killer = self.place = ""
        self.ended_at = math.inf
        self.raised_at = math.inf
        self.holds_up = ""
        self.is_told = self.is_given_up = False

    def has_failed(self) -> bool:
        return self.exit_code not in {None, 0} or self.is_given_up

    def note_raised(self, threads: list[str]) -> None:
        """Note that its main thread has raised; these threads are no daemons."""
        self.raised_at = time.monotonic()
        names = ", ".join(map(repr, threads))
        self.holds_up = f"thread {names}, which is no daemon," if threads else "a handler of atexit"

    def held_until(self) -> float:
        """Return when something follows from it that it has raised and still runs; infinity for never."""
        if self.exit_code is not None or self.is_given_up:
            return math.inf
        return self.raised_at + (RAISED_SECONDS if self.is_told else SLOW_END_SECONDS)

    def look_whether_held(self, now: float) -> None:
        if now < self.held_until():
            return
        if not self.is_told:
            self.is_told = True
            print_message(
                f"Worker {self.rank} has raised the exception above and still runs, {SLOW_END_SECONDS:g} s later: "
                f"{self.holds_up} holds it up. It is ended after {RAISED_SECONDS:g} s. (LS605)"
            )
        else:
            self.is_given_up = True

    def describe_exit(self) -> str:
        if self.exit_code is None:
            when = f"{RAISED_SECONDS:g} s later" if self.is_given_up else "when another had failed"
            return f"raised an exception, and still ran {when}: {self.holds_up} held it up"
        return describe_exit(self.exit_code, killer=self.killer or UNKNOWN_KILLER, place=self.place)

    def is_consequence(self) -> bool:
        """Return whether it has failed because another worker has, by what it wrote last."""
        return says_another_failed(self.traceback())

    def traceback(self) -> str:
        """Return its last traceback; empty if it was killed, because it may have caught that exception."""
        if self.stderr is None or (self.exit_code or 0) < 0:
            return ""
        return find_traceback(self.stderr.text())

    def failed_at(self) -> float:
        """Return when it raised or wrote its last traceback, because exiting may take long; else when it ended."""
        if self.raised_at < math.inf:
            return self.raised_at
        traceback_at = self.stderr.traceback_at if self.stderr is not None else None
        if traceback_at is None or (self.exit_code or 0) < 0 or self.ended_at - traceback_at > _TRACEBACK_SECONDS:
            return self.ended_at
        return traceback_at


@final
class _ScriptWorkerPool:
    def __init__(
        self, job: ScriptJob, server: ChannelServer, recorder: WorkerRecorder, variables: Mapping[str, str]
    ) -> None:
        self._job = job
        self._server = server
        self._recorder = recorder
        self._variables = variables
        self._workers: list[_ScriptWorker] = []
        self._sessions = Sessions()
        self._killers = KillerNames()
        # A single worker uses the terminal directly, as without a launcher: it may read input and show a progress bar.
        self._relays = (
            Relays(has_prefix=job.has_prefix and job.world_size > 1, cuts_lines=job.world_size > 1, log_dir=job.log_dir)
            if job.world_size > 1 or job.log_dir is not None
            else None
        )

    def start(self, rendezvous: Rendezvous) -> None:
        folder = self._sessions.folder
        run_id = f"{RUN_ID}{uuid.uuid4().hex}"
        for rank in range(self._job.world_size):
            environment = _environment(self._job, rank, rendezvous, is_piped=self._relays is not None)
            with self._server.worker_end(rank) as channel:
                own = {"TORCHELASTIC_RUN_ID": run_id, **channel_variables(channel, rendezvous.port, folder)}
                self._start_one(rank, {**environment, **self._variables, **own}, channel)

    def _start_one(self, rank: int, environment: dict[str, str], channel: int) -> None:
        local_rank = [f"{self._job.local_rank_option}={environment['LOCAL_RANK']}"] * bool(self._job.local_rank_option)
        command = [*self._job.program, *local_rank, *self._job.arguments]
        stdin = None if self._job.world_size == 1 else subprocess.DEVNULL
        outputs: tuple[int | None, int | None] = None, None
        tail: Tail | None = None
        with ExitStack() as stack:
            if self._relays is not None:
                stdout, _ = self._relays.open(rank, "stdout")
                stack.callback(os.close, stdout)
                stderr, tail = self._relays.open(rank, "stderr")
                stack.callback(os.close, stderr)
                outputs = stdout, stderr
            process = self._sessions.start(command, environment, stdin, outputs, channel)
        self._workers.append(_ScriptWorker(rank, process, tail))
        self._recorder.mark(EventKind.WORKER_STARTED, rank, process.pid, 0)

    def wait(self, signals: SignalPipe) -> Signals | None:
        """Wait until all have ended, one has failed, or a termination signal has come; return that signal."""
        deadline = failed_at = math.inf
        while any(worker.exit_code is None for worker in self._workers):
            until = min(deadline, *(worker.held_until() for worker in self._workers))
            seconds = None if until == math.inf else max(until - time.monotonic(), 0)
            if (stop := signals.wait(seconds, self._server.report_descriptor)) is not None:
                return stop
            self._collect_reports()
            self._collect_exits()
            if failed := [worker for worker in self._workers if worker.has_failed()]:
                failed_at = min(failed_at, time.monotonic())
                # Asked for again: what a worker wrote may come after its end.
                deadline = failed_at + patience_after(failed, is_sure=self._is_sure(failed))
                if time.monotonic() >= deadline:
                    break
        return None

    def _collect_reports(self) -> None:
        for rank, report in self._server.take_reports():
            if report["report"] == "raised":
                self._workers[rank].note_raised(report["threads"])
        for worker in self._workers:
            worker.look_whether_held(time.monotonic())

    def _is_sure(self, failed: Sequence[_ScriptWorker]) -> bool:
        """Return whether no failure can have come before these: a worker ends some time after its traceback."""
        tails = [worker.stderr for worker in self._workers if worker.exit_code is None or worker in failed]
        return not any(tail is not None and tail.traceback_at is not None for tail in tails)

    def _collect_exits(self) -> None:
        for worker in self._workers:
            if worker.exit_code is None and (code := exit_code(worker.process)) is not None:
                worker.exit_code, worker.ended_at = code, time.monotonic()
                worker.killer = self._killers.name()
                worker.place = record_end(self._recorder, worker.rank, worker.process.pid, code, worker.killer)

    def end(self, signals: SignalPipe, stop: Signals | None) -> None:
        """Stop the workers that still run and all that workers have started; print the end of their output."""
        is_interrupted = stop is Signals.SIGINT

        def tell() -> None:
            if stop is None and (message := self.describe_end().message):
                print_message(describe_waiting(message))

        self._sessions.end(
            Signals.SIGINT if is_interrupted else Signals.SIGTERM,
            self._job.grace_seconds,
            is_hurried=lambda seconds: signals.wait(seconds) is not None,
            tell=tell,
        )
        if self._relays is None:
            return
        self._relays.finish()
        deadline = time.monotonic() + _DRAIN_SECONDS if stop is not None else float("inf")
        while not self._relays.join(_JOIN_SECONDS) and time.monotonic() < deadline:
            if signals.wait(0) is not None:
                break

    def describe_end(self) -> Ending:
        """Return how a launch ended that no signal has stopped."""
        failed = [worker for worker in self._workers if worker.has_failed()]
        if not failed:
            return Ending(0, "")
        failed += [worker for worker in self._workers if worker not in failed and worker.raised_at < math.inf]
        failed.sort(key=lambda worker: (worker.is_consequence(), worker.failed_at()))
        first = failed[0]
        # The relays have printed what the workers wrote.
        message = describe_failures([_describe(worker, self._job.log_dir) for worker in failed], is_shown=True)
        if first.stderr is not None and not first.traceback():
            last = [line for line in first.stderr.text().splitlines() if line.strip()][-_NUM_LAST_LINES:]
            message += f"\n\nThe last lines that worker {first.rank} wrote to stderr:\n" * bool(last) + "\n".join(last)
        return Ending(exit_status(first.exit_code or 1), f"error: {message}", is_failure=True)

    def describe_stop(self, stop: Signals) -> Ending:
        """Return how a launch ended that a signal has stopped. A worker exits with 75 if it can be resumed."""
        self._collect_exits()
        if all(worker.exit_code == os.EX_TEMPFAIL for worker in self._workers):
            return Ending(os.EX_TEMPFAIL, f"Stopped by {stop.name}; every worker has ended with {os.EX_TEMPFAIL}.")
        how = "Interrupted" if stop is Signals.SIGINT else f"Stopped by {stop.name}"
        return Ending(exit_status(-stop), f"{how}; every worker has ended.")

    def close(self) -> None:
        """Kill all processes that are left, and close all pipes."""
        self._sessions.close()
        if self._relays is not None:
            self._relays.finish()


def _environment(job: ScriptJob, rank: int, rendezvous: Rendezvous, *, is_piped: bool) -> dict[str, str]:
    """Return all variables of a worker: those of the launch, else the user's, else our defaults."""
    local_rank = 0 if job.own_card_only else rank
    defaults = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if is_piped:
        defaults["PYTHONUNBUFFERED"] = "1"
    if job.placement.devices[0].name == "cpu":
        defaults |= FREED_MEMORY_VARIABLES
    # LAUNCHED is cleared: these are not workers of `ls.launch`, although one of those may have started this launcher.
    overrides = {
        **place_variables(rank=rank, local_rank=local_rank, world_size=job.world_size, port=rendezvous.port),
        **torchrun_variables(rank, job.world_size, is_served=rendezvous.is_served),
        "TORCHELASTIC_RESTART_COUNT": str(job.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        **device_variables(job.placement, rank, own_card_only=job.own_card_only),
        LAUNCHED: "",
        "OMP_NUM_THREADS": job.threads,
    }
    own = read_settings()
    python_path = with_drop_in(own.python_path()) if job.drop_in else own.python_path()
    overrides["PYTHONPATH"] = with_folder(python_path, _STARTUP_FOLDER)
    return own.for_worker(overrides, defaults=defaults)


def _describe(worker: _ScriptWorker, log_dir: Path | None) -> WorkerFailure:
    reason = worker.describe_exit()
    if log_dir is not None:
        reason += f" (log: {log_path(log_dir, worker.rank, 'stderr')})"
    return WorkerFailure(rank=worker.rank, reason=reason, traceback=worker.traceback(), error=None)


def python_program(script: str, *, is_module: bool) -> tuple[str, ...]:
    return (sys.executable, "-m", script) if is_module else (sys.executable, script)
