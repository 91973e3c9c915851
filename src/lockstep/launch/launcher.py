"""The parent: starts workers, waits for their reports, stops the rest when one fails.

launcher                                            worker r
--------                                            --------
1 store on a port that the kernel picks
2 start the process, send the assignment     ->     join the group, run the function
3 wait for reports and deaths                <-     report: result or failure
4 on the first failure: wait a moment for an earlier one, terminate, then kill, all that are left
5 end what workers have started and left behind: each leads a session (see sessions.py)
"""

import contextlib
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from lockstep.devices import Device, DeviceRequest, Placement, place_workers
from lockstep.errors import PeerFailedError, PeerLostError, ReductionError, WorkerFailedError, WorkerFailure
from lockstep.launch.descriptors import check_descriptors
from lockstep.launch.exits import describe_exit, describe_failures
from lockstep.launch.external import find_launcher, run_here
from lockstep.launch.messages import Assignment, Report, pack_call, read_up, write_down
from lockstep.launch.sessions import Sessions, exit_code
from lockstep.launch.signal_forwarding import HandingOn
from lockstep.launch.store import LOOPBACK_INTERFACE, open_store
from lockstep.processes.stop_signals import RELAYED, STOPPING, StopRequest
from lockstep.settings import LAUNCHED, worker_environment

_SETTLE_SECONDS = 0.5
"""After the first failure: how long to wait for one that came before it but is heard of later."""
_CAUSE_SECONDS = 5.0
"""The same, while all that is heard of says that it is another worker's doing."""
_CONSEQUENCES = (PeerFailedError, PeerLostError, ReductionError)
"""Errors that workers have because another one failed, if another one has any other error."""
_TERMINATE_SECONDS = 2.0
"""How long a worker may take to end after SIGTERM, before SIGKILL."""
_LEAVE_SECONDS = 30.0
"""How long a worker may take to tear down once all have reported, before SIGKILL."""
_POLL_SECONDS = 0.1
"""How often to look for workers that ended without their pipe closing: a process they started may hold it open."""
_END_POLL_SECONDS = 0.01
"""How often to look whether a worker that is about to end has ended."""
_NUM_DESCRIPTORS = 4
"""Of the launcher for each worker, at the most: two pipes, two connections to the store."""
_CLOSED = -1
"""Stands for a descriptor that is closed."""
_BOOTSTRAP = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
down, up, life = map(int, sys.argv[1:4])
stream = os.fdopen(down, "rb")
search_path = stream.readline()
if not search_path.endswith(b"\\n"):  # the launcher was interrupted before it sent it
    sys.exit(1)
sys.path[:] = json.loads(search_path)
from lockstep.launch.worker import main
main(stream, up, life)
"""


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    devices: DeviceRequest | Placement = None,
    force: bool = False,
    threads_per_worker: int = 1,
    seed: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(run, *args, **kwargs)` in every one of several new processes; return what each returned.

    Each worker has a process group (the default group) when the function begins, its GPU, if any, as current device,
    and its global generators seeded alike. Whichever its GPU is, it is "cuda:0" there: a worker sees no other. `run` is
    a `Run`. The function may be local, or come from a script or a notebook cell: it is sent by value, so that no
    `if __name__ == "__main__"` is needed. Workers take part in no Ctrl-C: it interrupts the caller, who stops them.
    SIGTERM is handed on to them: of those that do not handle it it is the end, and the caller's too; those that save
    and return let `launch` return. A second one ends all at once.

    In a process that torchrun, srun, mpirun or another launcher has started as one of several workers nothing is
    started: each worker calls the function itself, and all return the results of all (collective).

    Args:
        function: What to run.
        args: Its positional arguments after `run`; anything that pickles.
        workers: How many; on as many GPUs if there are any, else on the CPU.
        devices: `"auto"`, `"auto:3"`, `"auto:3>=20GiB"` (of free memory), `"cpu"`, `"cpu:2"`, or GPUs by the numbers
            that nvidia-smi shows or by UUID, such as `[0, 2, 5]` (`[[0, 1], [2, 3]]` for two per worker); None for
            `"auto"`. Or a placement, which is taken as it is.
        force: Take GPUs that others hold, too.
        threads_per_worker: CPU threads of torch's operators in each worker. It is not derived from the number of
            workers, because it changes the last bits of results.
        seed: Of the global generators (Python, NumPy, torch) when the function begins, the same in each worker.
        kwargs: Keyword arguments of the function.

    Returns:
        One result per worker, in rank order.

    Raises:
        DeviceError: No or zero workers, or devices that are not there or not free.
        WorkerFailedError: A worker raised or died; names the first one, with its traceback. The others are stopped.
        TypeError: The function or an argument cannot be pickled.
        UsageError: This process may not open enough descriptors for so many workers.
    """
    settings = LaunchSettings(
        workers=workers, devices=devices, force=force, threads_per_worker=threads_per_worker, seed=seed
    )
    told = find_launcher()
    if told is not None:
        return run_here(
            lambda run: function(run, *args, **kwargs),
            told,
            workers=workers,
            devices=devices,
            threads=threads_per_worker,
            seed=seed,
        )
    return call_on_workers(function, args, kwargs, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What `launch` is told besides the call; see there."""

    workers: int | None = None
    """How many."""
    devices: DeviceRequest | Placement = None
    """On what."""
    force: bool = False
    """Whether to take GPUs that others hold."""
    threads_per_worker: int = 1
    """CPU threads of each worker."""
    seed: int = 0
    """Of the global generators."""
    stop: StopRequest | None = None
    """Handed on to the workers, as a signal; None for functions that do not `listen` for any. Those that do have it
    blocked until then, so that it is not lost on one that is still importing."""


def call_on_workers(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: LaunchSettings
) -> list[Any]:
    """Do what `launch` does where no other launcher has started workers; raise what it raises."""
    placement = place_workers(settings.devices, workers=settings.workers, force=settings.force)
    check_descriptors(len(placement.devices), _NUM_DESCRIPTORS)
    call = pack_call(function, args, kwargs)
    with ExitStack() as stack:
        handing_on = stack.enter_context(HandingOn())
        store = open_store()
        lifeline, held = os.pipe()
        with _sigint_held_back():
            crew = _Crew(held, can_stop=settings.stop is not None)
            stack.callback(crew.stop)
        try:
            for rank, device in enumerate(placement.devices):
                crew.start(
                    Assignment(
                        rank=rank,
                        world_size=len(placement.devices),
                        device=device.name,
                        store_port=store.port,
                        threads=settings.threads_per_worker,
                        seed=settings.seed,
                        parent_pid=os.getpid(),
                        argv=tuple(sys.argv),
                        call=call,
                    ),
                    device,
                    lifeline,
                )
        finally:
            os.close(lifeline)
        crew.assign()
        if settings.stop is None:
            handing_on.begin(crew.terminate, crew.was_terminated)
        else:
            settings.stop.tell(crew.ask_to_stop)
        reports = crew.wait()
    return [_load_result(report) for report in reports]


@final
class _Worker:
    """One started process, as the launcher sees it."""

    def __init__(self, assignment: Assignment, process: subprocess.Popen[bytes], downward: int, upward: int) -> None:
        self.rank = assignment.rank
        self.assignment = assignment
        self.process = process
        self.downward = downward
        self.upward = upward
        self.received = bytearray()
        self.report: Report | None = None
        self.died_at: float | None = None


@final
class _Crew:
    """The workers of one launch.

    Args:
        lifeline: The end of their lifeline that only the launcher holds: open while it lives, a byte for each to leave.
        can_stop: Whether the workers take signals as requests.
    """

    def __init__(self, lifeline: int, *, can_stop: bool) -> None:
        self._lifeline = lifeline
        self._can_stop = can_stop
        self._sessions = Sessions()
        self._workers: list[_Worker] = []
        self._released = False

    def start(self, assignment: Assignment, device: Device, lifeline: int) -> None:
        """Start one worker; it waits for its assignment while it imports."""
        with _sigint_held_back(), _blocked(STOPPING if self._can_stop else ()):  # until `stop` knows of it
            down_read, down_write = os.pipe()
            up_read, up_write = os.pipe()
            command = [sys.executable, "-c", _BOOTSTRAP, str(down_read), str(up_write), str(lifeline)]
            try:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    command,
                    pass_fds=(down_read, up_write, lifeline),
                    stdin=subprocess.DEVNULL,
                    env=worker_environment({**_variables(assignment), **device.variables()}, seed=assignment.seed),
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
            self._workers.append(_Worker(assignment, process, down_write, up_read))

    def assign(self) -> None:
        """Send the assignments; all workers have started by then, so that none waits for another to import."""
        for worker in self._workers:
            downward, worker.downward = worker.downward, _CLOSED
            # A broken pipe: it is dead already, and `wait` says so, with its exit code.
            with contextlib.suppress(BrokenPipeError), os.fdopen(downward, "wb") as stream:
                write_down(stream, sys.path, worker.assignment)

    def ask_to_stop(self) -> None:
        """Hand a request to stop on to every worker that listens for it."""
        self._signal(RELAYED)

    def terminate(self) -> None:
        """Hand SIGTERM on to every worker."""
        self._signal(signal.SIGTERM)

    def was_terminated(self) -> bool:
        """Return whether workers have failed, and all of them by SIGTERM."""
        failed = [worker for worker in self._workers if _failed(worker) and not _is_consequence(worker)]
        return bool(failed) and all(
            worker.report is None and exit_code(worker.process) == -signal.SIGTERM for worker in failed
        )

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if exit_code(worker.process) is None:
                os.kill(worker.process.pid, number)

    def wait(self) -> list[Report]:
        """Return every worker's report, in rank order.

        Raises:
            WorkerFailedError: One failed.
        """
        deadline = math.inf
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                os.set_blocking(worker.upward, False)
                selector.register(worker.upward, selectors.EVENT_READ, worker)
            while selector.get_map():
                if time.monotonic() >= deadline:
                    break
                heard = [key.data for key, _ in selector.select(_POLL_SECONDS)]
                silent = [key.data for key in selector.get_map().values() if exit_code(key.data.process) is not None]
                for worker in {*heard, *silent}:
                    if _hear(worker, has_ended=worker in silent):
                        selector.unregister(worker.upward)
                failed = [worker for worker in self._workers if _failed(worker)]
                if failed:
                    patience = _CAUSE_SECONDS if all(map(_is_consequence, failed)) else _SETTLE_SECONDS
                    deadline = min(deadline, time.monotonic() + patience)
        failed = [worker for worker in self._workers if _failed(worker)]
        if failed:
            failures = [(_is_consequence(worker), *_describe_failure(worker)) for worker in failed]
            failures.sort(key=lambda failure: failure[:2])
            raise _failed_error(tuple(failure for *_, failure in failures))
        with contextlib.suppress(BrokenPipeError):  # all have ended already, killed after their reports
            os.write(self._lifeline, b"." * len(self._workers))
        self._released = True
        return [worker.report for worker in self._workers if worker.report is not None]

    def stop(self) -> None:
        """End every process that is still there, and what workers have started; none is left when this returns."""
        try:
            if self._released:
                deadline = time.monotonic() + _LEAVE_SECONDS
                for worker in self._workers:
                    _wait_for(worker.process, deadline)
            # To workers that take it as a request SIGTERM would not be the end.
            first = signal.SIGKILL if self._can_stop else signal.SIGTERM
            self._sessions.end(first, _TERMINATE_SECONDS, is_hurried=_sleep)
        finally:  # also when a second Ctrl-C comes while this waits
            self._sessions.close()
            for worker in self._workers:
                os.close(worker.upward)
                if worker.downward != _CLOSED:
                    os.close(worker.downward)
            os.close(self._lifeline)


def _variables(assignment: Assignment) -> dict[str, str]:
    """Return the environment of torchrun, for code that reads it; Gloo is kept on loopback."""
    threads = str(assignment.threads)
    return {
        LAUNCHED: str(assignment.store_port),
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_WORLD_SIZE": str(assignment.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(assignment.store_port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


@contextlib.contextmanager
def _sigint_held_back() -> Iterator[None]:
    """Hold back Ctrl-C, from this process till the end, and from a child until it has said that it ignores it.

    The child inherits this thread's mask. That does not keep the signal from a process that has other threads, and
    Python would still raise KeyboardInterrupt in this one: hence the handler.
    """
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Python runs handlers in the main thread, which alone may set them; None is one that it does not know of.
    has_handler = threading.current_thread() is threading.main_thread() and handler is not None
    if has_handler:
        signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if has_handler:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in a child for as long as it likes: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return how a process ended; None if it has not by the deadline."""
    while (code := exit_code(process)) is None and time.monotonic() < deadline:
        time.sleep(_END_POLL_SECONDS)
    return code


def _sleep(seconds: float) -> bool:
    """Wait, and tell that nobody is in a hurry: a second Ctrl-C is raised."""
    time.sleep(seconds)
    return False


def _hear(worker: _Worker, *, has_ended: bool) -> bool:
    """Read what a worker has written; return whether that was the last of it: its report, or its end.

    The end of the pipe is not waited for: a process that the worker started may hold it open.
    """
    is_over = has_ended
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(worker.upward, 1 << 20):
            worker.received += chunk
        is_over = True
    worker.report = read_up(worker.received)
    if worker.report is None and is_over:
        worker.died_at = time.monotonic()
    return worker.report is not None or is_over


def _load_result(report: Report) -> Any:
    try:
        return pickle.loads(report.result or b"")  # noqa: S301 - from our own child
    except Exception as error:
        reason = f"returned a value that cannot be read here: {type(error).__name__}: {error}"
        failure = WorkerFailure(rank=report.rank, reason=reason, traceback="", error=error)
        raise WorkerFailedError(
            f"Worker {report.rank} {reason}. Return numbers, text, containers or CPU tensors.", (failure,)
        ) from error


def _load_error(report: Report) -> BaseException | None:
    """Return the worker's exception, or None if its class is known there only; its text is in the report anyway."""
    try:
        error: BaseException | None = pickle.loads(report.error) if report.error is not None else None  # noqa: S301
    except Exception:  # noqa: BLE001 - whatever a class from elsewhere does when it is missing here
        return None
    return error


def _failed(worker: _Worker) -> bool:
    return worker.died_at is not None or (worker.report is not None and worker.report.result is None)


def _is_consequence(worker: _Worker) -> bool:
    """Whether a worker that failed says that another one has."""
    return worker.report is not None and isinstance(_load_error(worker.report), _CONSEQUENCES)


def _describe_failure(worker: _Worker) -> tuple[float, WorkerFailure]:
    """Return when the worker failed, and how.

    A worker that died without a word is heard of when the kernel closes its pipe, about when the others lose their
    connections to it: so it counts as a little earlier than it was heard of.
    """
    report = worker.report
    if report is None:
        assert worker.died_at is not None
        code = _wait_for(worker.process, time.monotonic() + _TERMINATE_SECONDS)
        if code is None:
            reason = "closed its pipe to the launcher and runs on"
        else:
            reason = describe_exit(code) + (" and no report" if code >= 0 else "")
        failure = WorkerFailure(rank=worker.rank, reason=reason, traceback="", error=None)
        return worker.died_at - _SETTLE_SECONDS, failure
    return report.time, WorkerFailure(
        rank=worker.rank, reason=report.reason, traceback=report.traceback, error=_load_error(report)
    )


def _failed_error(failures: tuple[WorkerFailure, ...]) -> WorkerFailedError:
    error = WorkerFailedError(describe_failures(failures), failures)
    error.__cause__ = failures[0].error
    return error
