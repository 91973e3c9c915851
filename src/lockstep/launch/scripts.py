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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import final

from lockstep.devices import Device, Placement, count_cores
from lockstep.errors import WorkerFailedError, WorkerFailure
from lockstep.launch import script_entry
from lockstep.launch.continuation import Continuation
from lockstep.launch.environment import LOOPBACK_INTERFACE, NOTICE, place_variables, with_drop_in, with_folder
from lockstep.launch.exits import (
    GRACE_SECONDS,
    RAISED_SECONDS,
    SLOW_END_SECONDS,
    describe_failures,
    exit_status,
    find_traceback,
    says_another_failed,
)
from lockstep.launch.output import Relays, Tail, flush_own_output, log_path, make_log_directory, print_message
from lockstep.launch.rendezvous import Rendezvous, open_rendezvous
from lockstep.launch.restarts import call_with_restarts
from lockstep.launch.scaling import RunningLaunch
from lockstep.launch.sessions import ISOLATED, check_descriptors
from lockstep.launch.signals import SignalPipe
from lockstep.launch.supervision import Supervision, first_failures_first
from lockstep.launch.template import Process
from lockstep.launch.worker_pool import End, Stopping, Worker, WorkerPool, open_pool
from lockstep.processes.host import FREED_MEMORY_VARIABLES
from lockstep.recording import new_recording
from lockstep.settings import LAUNCHED, RUN_ID, channel_variables, read_settings, recording_variable

_TRACEBACK_SECONDS = 5.0
"""If a worker ends later than this after its last traceback, it is assumed to have caught that exception."""
_DRAIN_SECONDS = 1.0
"""After a signal: how long the terminal may take to print the workers' output."""
_JOIN_SECONDS = 0.05
_NUM_LAST_LINES = 10
_STARTUP_FOLDER = str(Path(__file__).parents[1] / "torch_private" / "startup")
"""The folder of a `sitecustomize` that changes what torch does in the processes of a script."""
_NUM_DESCRIPTORS = 12
"""How many the launcher needs for each worker, at most: its process, two pipes, two log files, its channel, and three
for each of two connections to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    program: tuple[str, ...]
    """Path of an executable, and its arguments up to and with the script."""
    arguments: tuple[str, ...]
    placement: Placement
    num_threads: int | None = None
    """CPU threads of each worker; None for OMP_NUM_THREADS, or, if that is not set, an equal share of the cores."""
    portable: bool = False
    own_card_only: bool = False
    """Whether each worker sees only its own GPU, and has local rank 0."""
    local_rank_option: str = ""
    """The option that passes the local rank to the script: "--local-rank" or "--local_rank"; empty for none."""
    has_prefix: bool = True
    log_dir: Path | None = None
    drop_in: bool = False
    num_restarts: int = 0
    """How often the workers were started before, for TORCHELASTIC_RESTART_COUNT."""
    max_restarts: int = 0
    grace_seconds: float = GRACE_SECONDS
    """How long workers may take to end after the first signal, before they get SIGKILL."""

    @property
    def world_size(self) -> int:
        return len(self.placement.devices)

    @property
    def threads(self) -> str:
        if self.num_threads is not None or self.portable:
            return "1" if self.portable else str(self.num_threads)
        return read_settings().num_threads() or str(max(count_cores() // self.world_size, 1))

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
    is_failure: bool = False
    """Whether a worker has failed; not where a signal to the launcher has stopped the workers."""


def run_with_restarts(job: ScriptJob, tell: Callable[[str], None]) -> Ending:
    """Run a script, and start its workers again where one has failed. Main thread only.

    The logs of a restart are in a folder of their own, `restart-1`, in the log directory.
    """
    endings: list[Ending] = []

    def run(attempt: ScriptJob) -> Ending:
        folder, number = attempt.log_dir, len(endings)
        if folder is not None and number:
            folder /= f"restart-{number}"
        endings.append(run_script(replace(attempt, log_dir=folder, num_restarts=number)))
        if endings[-1].is_failure:
            raise WorkerFailedError(endings[-1].message)
        return endings[-1]

    try:
        return call_with_restarts(
            run, job, most=job.max_restarts, tell=lambda text: tell(f"{endings[-1].message}\n\n{text}")
        )
    except WorkerFailedError as error:
        return replace(endings[-1], message=str(error))


def run_script(job: ScriptJob) -> Ending:
    """Start the workers and wait for them; all have ended when this returns. Main thread only."""
    check_descriptors(job.world_size, _NUM_DESCRIPTORS)
    if job.log_dir is not None:
        make_log_directory(job.log_dir)
    flush_own_output()
    with ExitStack() as stack:
        signals = stack.enter_context(SignalPipe())
        rendezvous = stack.enter_context(open_rendezvous(job.world_size))
        recording = new_recording(None)
        starter = ScriptWorkers(job, rendezvous, recording)
        stack.callback(starter.close)
        stopping = Stopping(
            grace_seconds=job.grace_seconds,
            is_hurried=lambda seconds: signals.wait(seconds) is not None,
            tell=lambda text: print_message(f"error: {text}"),
        )
        pool = stack.enter_context(open_pool(starter, stopping, recording=recording, world_size=job.world_size))
        pool.watch(signals.source, partial(_raise_stopped, signals))
        failed: list[ScriptWorker] = []
        stop: Signals | None = None
        try:
            pids = {rank: pool.start(rank, device).pid for rank, device in enumerate(job.placement.devices)}
            Supervision(RunningLaunch(pool=pool, continuation=Continuation(pool.server, pids))).wait()
        except StoppedError as stopped:
            stop = stopped.signal
        except WorkerFailedError:
            workers = [worker for worker in pool.workers.values() if isinstance(worker, ScriptWorker)]
            failed = [worker for worker in workers if worker.has_failed or worker.raised_at < math.inf]
        pool.end(Signals.SIGINT if stop is Signals.SIGINT else None)
        starter.print_rest(signals, _DRAIN_SECONDS if stop is not None else math.inf)
        if stop is not None:
            return _describe_stop(pool, stop)
        return _describe_failure(first_failures_first(failed)) if failed else Ending(0, "")


@final
class StoppedError(Exception):
    def __init__(self, signal: Signals) -> None:
        super().__init__(signal.name)
        self.signal = signal


def _raise_stopped(signals: SignalPipe) -> bool:
    if (stop := signals.wait(0)) is not None:
        raise StoppedError(stop)
    return True


def _describe_stop(pool: WorkerPool, stop: Signals) -> Ending:
    """Return how a launch ended that a signal has stopped. A worker exits with 75 if it can be resumed."""
    for worker in pool.workers.values():
        pool.look(worker)
    if all(worker.exit_code == os.EX_TEMPFAIL for worker in pool.workers.values()):
        return Ending(os.EX_TEMPFAIL, f"Stopped by {stop.name}; every worker has ended with {os.EX_TEMPFAIL}.")
    how = "Interrupted" if stop is Signals.SIGINT else f"Stopped by {stop.name}"
    return Ending(exit_status(-stop), f"{how}; every worker has ended.")


@final
class ScriptWorker(Worker):
    """A worker that says of its own end what it writes to stderr, if the launcher reads that, and that it has raised.

    A script that has raised and is held up by a thread is the failure after some time: others may wait for it.
    """

    def __init__(self, number: int, device: Device, process: Process, stderr: Tail | None, log: Path | None) -> None:
        super().__init__(number, device, process)
        self.stderr = stderr
        self._log = log
        self._is_told = False

    @property
    def due(self) -> float:
        if self.exit_code is not None or self.is_given_up:
            return math.inf
        return self.raised_at + (RAISED_SECONDS if self._is_told else SLOW_END_SECONDS)

    @property
    def may_tell_of_failure(self) -> bool:
        """Whether it has written a traceback: a worker ends some time after that."""
        return self.stderr is not None and self.stderr.traceback_at is not None

    def look_own(self) -> None:
        if self.due > time.monotonic():
            return
        if self._is_told:
            self.is_given_up = True
            return
        self._is_told = True
        print_message(
            f"Worker {self.number} has raised the exception above and still runs, {SLOW_END_SECONDS:g} s later: "
            f"{self.held_up_by} holds it up. It is ended after {RAISED_SECONDS:g} s. (LS605)"
        )

    def said_end(self) -> End | None:
        return End.EXITED if self.exit_code == 0 else None

    def said_failed_at(self) -> float | None:
        """Return when it raised or wrote its last traceback, because exiting may take long."""
        if self.raised_at < math.inf:
            return self.raised_at
        traceback_at = self.stderr.traceback_at if self.stderr is not None else None
        if traceback_at is None or (self.exit_code or 0) < 0 or self.ended_at - traceback_at > _TRACEBACK_SECONDS:
            return None
        return traceback_at

    def failure(self) -> WorkerFailure:
        reason = self.describe_end()
        if self._log is not None:
            reason += f" (log: {self._log})"
        return WorkerFailure(rank=self.number, reason=reason, traceback=self.traceback(), error=None)

    def describe_end(self) -> str:
        if self.exit_code is None:
            when = f"{RAISED_SECONDS:g} s later" if self.is_given_up else "when another had failed"
            return f"raised an exception, and still ran {when}: {self.held_up_by} held it up"
        return self.describe_exit()

    def is_consequence(self) -> bool:
        return says_another_failed(self.traceback())

    def traceback(self) -> str:
        """Return its last traceback; empty if it was killed, because it may have caught that exception."""
        if self.stderr is None or (self.exit_code or 0) < 0:
            return ""
        return find_traceback(self.stderr.text())

    def close(self) -> None:
        """Do nothing: the relays own the pipes."""


@final
class ScriptWorkers:
    def __init__(self, job: ScriptJob, rendezvous: Rendezvous, recording: Path | None) -> None:
        self._job = job
        self._rendezvous = rendezvous
        self._run_id = f"{RUN_ID}{uuid.uuid4().hex}"
        self._recording = {} if recording is None else recording_variable(str(recording))
        # A single worker uses the terminal directly, as without a launcher: it may read input and show a progress bar.
        self._relays = (
            Relays(has_prefix=job.has_prefix and job.world_size > 1, cuts_lines=job.world_size > 1, log_dir=job.log_dir)
            if job.world_size > 1 or job.log_dir is not None
            else None
        )

    def signals_held_back(self) -> AbstractContextManager[None]:
        """Hold nothing back: here signals interrupt nothing, and a script has the mask of its launcher."""
        return nullcontext()

    def start(self, pool: WorkerPool, number: int, device: Device, channel: int) -> ScriptWorker:
        job = self._job
        environment = {
            **script_variables(job, number, self._rendezvous, is_piped=self._relays is not None),
            **self._recording,
            "TORCHELASTIC_RUN_ID": self._run_id,
            **channel_variables(channel, self._rendezvous.port, pool.folder),
        }
        local_rank = [f"{job.local_rank_option}={environment['LOCAL_RANK']}"] * bool(job.local_rank_option)
        stdout = stderr = tail = None
        with ExitStack() as stack:
            if self._relays is not None:
                stdout, _ = self._relays.open(number, "stdout")
                stack.callback(os.close, stdout)
                stderr, tail = self._relays.open(number, "stderr")
                stack.callback(os.close, stderr)
            process = subprocess.Popen(  # noqa: S603 - what the user asked for
                [
                    *(sys.executable, *ISOLATED, script_entry.__file__, str(os.getpid())),
                    *(*job.program, *local_rank, *job.arguments),
                ],
                pass_fds=(channel,),
                stdin=None if job.world_size == 1 else subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        log = None if job.log_dir is None else log_path(job.log_dir, number, "stderr")
        return ScriptWorker(number, device, process, tail, log)

    def print_rest(self, signals: SignalPipe, seconds: float) -> None:
        """Print the end of what the workers wrote, until another signal comes or the time is over."""
        if self._relays is None:
            return
        self._relays.finish()
        deadline = time.monotonic() + seconds
        while not self._relays.join(_JOIN_SECONDS) and time.monotonic() < deadline:
            if signals.wait(0) is not None:
                break

    def close(self) -> None:
        if self._relays is not None:
            self._relays.finish()


def _describe_failure(failed: Sequence[ScriptWorker]) -> Ending:
    # The relays have printed what the workers wrote.
    first, message = failed[0], describe_failures([worker.failure() for worker in failed], is_shown=True)
    if first.stderr is not None and not first.traceback():
        last = [line for line in first.stderr.text().splitlines() if line.strip()][-_NUM_LAST_LINES:]
        message += f"\n\nThe last lines that worker {first.number} wrote to stderr:\n" * bool(last)
        message += "\n".join(last)
    return Ending(exit_status(first.exit_code or 1), f"error: {message}", is_failure=True)


def script_variables(job: ScriptJob, rank: int, rendezvous: Rendezvous, *, is_piped: bool) -> dict[str, str]:
    """Return all variables of a worker: those of the launch, else the user's, else our defaults."""
    local_rank = 0 if job.own_card_only else rank
    defaults = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if is_piped:
        defaults["PYTHONUNBUFFERED"] = "1"
    devices = job.placement.devices
    if devices[0].name == "cpu":
        defaults |= FREED_MEMORY_VARIABLES
    own = read_settings()
    python_path = with_drop_in(own.python_path()) if job.drop_in else own.python_path()
    overrides = {
        **place_variables(rank=rank, local_rank=local_rank, world_size=job.world_size, port=rendezvous.port),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(job.world_size),
        "TORCHELASTIC_USE_AGENT_STORE": str(rendezvous.is_served),
        "TORCHELASTIC_RESTART_COUNT": str(job.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        **(devices[rank].variables() if job.own_card_only else job.placement.variables_of_all()),
        # Cleared: these are not workers of `ls.launch`, although one of those may have started this launcher.
        LAUNCHED: "",
        "OMP_NUM_THREADS": job.threads,
        "PYTHONPATH": with_folder(python_path, _STARTUP_FOLDER),
        **(own.portable_variables() if job.portable else {}),
    }
    if own.observation() is not None:  # what depends on the order of a set shall show
        overrides["PYTHONHASHSEED"] = str(rank)
    return own.for_worker(overrides, defaults=defaults)


def python_program(script: str, *, is_module: bool) -> tuple[str, ...]:
    return (sys.executable, "-m", script) if is_module else (sys.executable, script)
