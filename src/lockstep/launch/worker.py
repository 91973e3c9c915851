"""A worker of `launch`: it receives its task, joins the group, calls the function and reports."""

import atexit
import contextlib
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, final

import torch

from lockstep.channel.client import ChannelClosedError
from lockstep.comm import destroy_process_group, report_failure, send_exit_notices
from lockstep.comm.bootstrap.process_group import choose_backend
from lockstep.comm.generations import Generations, NextGeneration, current_generations, follow_generations
from lockstep.errors import GroupError
from lockstep.launch.environment import add_ipython_functions
from lockstep.launch.messages import Report, Run, WorkerTask, pack_result, send_report
from lockstep.launch.pickling import pack
from lockstep.launch.signals import look_at_main_thread
from lockstep.processes.ending import die_with_parent, exit_quickly
from lockstep.processes.forking import call_in_children, this_process
from lockstep.processes.host import keep_freed_memory, keep_temporary_files_in
from lockstep.processes.reproducibility import seed_generators
from lockstep.processes.stop_signals import end_by_sigterm, let_sigterm_end
from lockstep.recording import open_recorder, own_recorder
from lockstep.settings import write_place
from lockstep.torch_private.groups import RESERVED_PORT
from lockstep.torch_private.portable import make_portable

_LAST_CALLS_SECONDS = 2.0
"""After the function has returned: how long this worker waits for the others before it sends an exit notice."""
_LOOK_SECONDS = 0.02
"""How often a worker that has returned looks whether the others need it, because one is lost."""


def main(
    task_pipe: BinaryIO, report_descriptor: int, launcher_pipe: int, channel_descriptor: int, port_descriptor: int
) -> None:
    """Run one worker from start to end; the search path, which comes first in `task_pipe`, was read already."""
    try:
        task: WorkerTask = pickle.loads(task_pipe.read())  # noqa: S301 - from our parent, over a pipe only we hold
    except (EOFError, pickle.UnpicklingError):  # the launcher was interrupted while it sent it
        sys.exit(1)
    task_pipe.close()
    # Ctrl-C reaches every process of the terminal. Workers ignore it, from the first line of `_BOOTSTRAP` on. Only the
    # launcher reacts to it.
    _keep_from_children(report_descriptor, launcher_pipe)
    RESERVED_PORT.hold(port_descriptor)
    call_in_children(RESERVED_PORT.let_go)
    die_with_parent(task.parent_pid)
    may_exit = threading.Event()
    threading.Thread(target=_watch_launcher, args=(launcher_pipe, may_exit), daemon=True).start()
    sys.argv[:] = task.argv
    if task.is_from_ipython:
        add_ipython_functions()
    exit_quickly()
    keep_temporary_files_in(task.folder)
    process = this_process()
    report = _run(task, channel_descriptor)
    if this_process() != process:
        _end_forked(report)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    try:
        with os.fdopen(report_descriptor, "wb") as report_pipe:
            send_report(report_pipe, report)
    except OSError:  # the function has closed it
        _show(report)
        raise
    if report.result is not None:
        # All workers destroy their groups together: to a worker that still communicates, a worker without its group
        # looks lost.
        if not _wait_for_others(may_exit, time.monotonic() + _LAST_CALLS_SECONDS):
            # Another worker may still call a collective, as in an evaluation on rank 0 alone. Without this notice it
            # would wait until its timeout.
            send_exit_notices()
            _wait_for_others(may_exit, math.inf)
        destroy_process_group()


def _end_forked(report: Report) -> None:
    """End a process that the function has forked, and that has come to the function's end: it is no worker."""
    if report.traceback:
        sys.stderr.write(f"A process that the function has forked (pid {os.getpid()}) raised:\n")
        _show(report)
    sys.exit(1 if report.traceback else 0)


def _show(report: Report) -> None:
    sys.stderr.write(report.traceback.encode(errors="backslashreplace").decode())


def _wait_for_others(may_exit: threading.Event, deadline: float) -> bool:
    """Wait until all workers may exit, and help them to continue if one is lost; return False at the deadline."""
    while not may_exit.wait(_LOOK_SECONDS):
        generations = current_generations()
        if generations is not None and generations.has_next and generations.help_others is not None:
            with contextlib.suppress(GroupError):  # those that need the group raise it themselves
                generations.help_others()
        if time.monotonic() > deadline:
            return False
    return True


def _keep_from_children(*descriptors: int) -> None:
    """Close the launcher's pipes in every process that the function starts."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed already
                os.close(descriptor)

    call_in_children(close)


def _watch_launcher(launcher_pipe: int, may_exit: threading.Event) -> None:
    """Set `may_exit` when the launcher sends a byte. End this process at once when the pipe closes: the launcher ended.

    On Linux the kernel does the second (`die_with_parent`); this is for other systems.
    """
    if os.read(launcher_pipe, 1):
        may_exit.set()
    else:
        os._exit(1)


def _run(task: WorkerTask, channel_descriptor: int) -> Report:
    try:
        run = _set_up(task, channel_descriptor)
        function, args, kwargs = pickle.loads(task.call)  # noqa: S301 - from our parent, as above
        result = function(run, *args, **kwargs)
        packed = pack_result(result)
    except BaseException as error:  # noqa: BLE001 - it is reported to the launcher, SystemExit included
        failed_at = time.monotonic()  # before anything else: the earliest failure is reported as the cause
        if not _has_left():
            report = _failure(task.worker, error, failed_at)
            report_failure(error)
            return report
    if _has_left():
        return Report(rank=task.worker, time=time.monotonic(), has_left=True)
    return Report(rank=task.worker, time=time.monotonic(), result=packed)


def _has_left() -> bool:
    generations = current_generations()
    return generations is not None and generations.has_left


def _set_up(task: WorkerTask, channel_descriptor: int) -> Run:
    if task.recording:
        open_recorder(
            own_recorder(),
            Path(task.recording),
            worker=task.worker,
            rank=task.rank,
            world_size=task.world_size,
            capacity=task.capacity,
        )
    device = torch.device(task.device)
    if task.is_portable:
        make_portable(device)
    torch.set_num_threads(1 if task.is_portable else task.threads)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.accelerator.set_device_index(device)
    generations = Generations(channel_descriptor, choose_backend(device))
    generations.is_joiner = task.is_joiner
    generations.look_at_main_thread = look_at_main_thread
    generations.make_first(task.rank, task.world_size, f"joiner/{task.worker}" if task.is_joiner else "")
    follow_generations(generations)
    request = LeaveRequest(generations)
    generations.on_ready = lambda: leave_on_sigterm(request)
    seed_generators(task.seed)
    run = Run(rank=task.rank, world_size=task.world_size, local_rank=task.worker, device=device, is_new=task.is_joiner)

    def follow(joined: NextGeneration) -> None:
        assert joined.rank is not None, "a worker that leaves joins no generation"
        run.rank, run.world_size = joined.rank, joined.world_size
        write_place(joined.rank, joined.world_size)
        own_recorder().set_place(joined.rank, joined.world_size, joined.number)

    generations.on_joined = follow
    return run


def _failure(worker: int, error: BaseException, failed_at: float) -> Report:
    try:
        packed = pack(error)
        pickle.loads(packed)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - pickling a user's exception may raise anything; its text is still sent
        packed = None
    # The first frame is of this module. The user needs only frames of their code.
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return Report(
        rank=worker,
        time=failed_at,
        reason="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
        error=packed,
    )


_CHUNK_BYTES = 4096


@final
class LeaveRequest:
    """SIGTERM to one worker asks the launcher, once, to let it leave the others after the step under way.

    A machine that is taken back, or a colleague who needs the GPU, sends it to one process. Where the worker cannot
    leave, because too few would be left or the launcher has got SIGTERM too, `otherwise` is called in any thread: it
    does what the signal did before (None: end by SIGTERM).

    After a refusal SIGTERM ends the worker where `handles` says that the handler of this request is the present one:
    it may stand in native code that calls no handler.
    """

    def __init__(self, generations: Generations, otherwise: Callable[[], None] | None = None) -> None:
        self.otherwise = otherwise or end_by_sigterm
        self.handles: Callable[[], bool] = lambda: False
        self._generations = generations
        self._changing = threading.Lock()
        self._has_asked = False
        self._is_refused = False
        generations.on_stay = self.refuse

    def ask(self) -> None:
        """Ask the launcher; after a refusal do what is done otherwise (any thread but one that handles a signal)."""
        with self._changing:
            is_first = not self._has_asked
            self._has_asked = True
            is_refused = self._is_refused
        if is_refused:
            self.otherwise()
        elif is_first:
            with contextlib.suppress(ChannelClosedError):  # the launcher has ended, and with it this process
                self._generations.report("leave")

    def ask_from_handler(self) -> None:
        """Do the same in a signal handler, which may have interrupted this thread while it held a lock."""
        threading.Thread(target=self.ask, name="asks to leave", daemon=True).start()

    def refuse(self) -> None:
        with self._changing:
            self._is_refused = True
            has_asked = self._has_asked
        if self.handles():
            let_sigterm_end()
        if has_asked:
            self.otherwise()


def leave_on_sigterm(request: LeaveRequest) -> None:
    """Ask to leave when SIGTERM comes, unless something else handles it already (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handler = _Handler(request)
        signal.signal(signal.SIGTERM, handler)
        request.handles = handler.is_present
        atexit.register(handler.undo)
        call_in_children(handler.undo)


@final
class _Handler:
    """Asks to leave, and so does a thread, which waits for the byte that the interpreter writes when the signal comes.

    Python calls a handler only between two lines of Python, and native code may run for long.
    Code of the user's may take the thread's descriptor (asyncio does, and drops it again when its loop is closed), or
    call this from a handler of its own. A child that is forked has neither the handler nor the descriptor.
    """

    def __init__(self, request: LeaveRequest) -> None:
        self._request = request
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if before >= 0:  # an event loop of the user's: its byte stays its own
            signal.set_wakeup_fd(before)
        else:
            threading.Thread(target=self._wait, name="waits for SIGTERM", daemon=True).start()

    def __call__(self, _number: int, _frame: object) -> None:
        self._request.ask_from_handler()

    def is_present(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def undo(self) -> None:
        """Undo it in a child, and before the interpreter shuts down: then it calls no handler any more."""
        if self.is_present():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (current := signal.set_wakeup_fd(-1)) not in {self._writer, -1}:
            signal.set_wakeup_fd(current)

    def _wait(self) -> None:
        while numbers := os.read(self._reader, _CHUNK_BYTES):
            if signal.SIGTERM in numbers and self.is_present():
                self._request.ask()
