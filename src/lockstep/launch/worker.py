"""A worker of `launch`: receives its task, joins the group, calls the function, reports."""

import contextlib
import datetime
import os
import pickle
import sys
import threading
import time
import traceback
from typing import BinaryIO

import torch
import torch.distributed as dist

from lockstep.comm import destroy_process_group, init_process_group, report_failure, send_exit_notices
from lockstep.comm.bootstrap.process_group import choose_backend
from lockstep.launch.messages import Report, Run, WorkerTask, pack_result, send_report
from lockstep.launch.pickling import pack
from lockstep.processes.lifetime import die_with_parent, keep_freed_memory
from lockstep.processes.reproducibility import seed_generators

_RENDEZVOUS_SECONDS = 300
_LAST_CALLS_SECONDS = 2.0
"""How long to wait for the other workers' last collectives after the function has returned here."""


def main(task_pipe: BinaryIO, report_descriptor: int, launcher_pipe: int) -> None:
    """Run one worker from start to end.

    Args:
        task_pipe: Where the task comes from, after the search path, which was read already.
        report_descriptor: Where the report goes.
        launcher_pipe: A pipe that the launcher holds open as long as it lives.
    """
    try:
        task: WorkerTask = pickle.loads(task_pipe.read())  # noqa: S301 - from our parent, over a pipe only we hold
    except (EOFError, pickle.UnpicklingError):  # the launcher was interrupted while it sent it
        sys.exit(1)
    task_pipe.close()
    # Ctrl-C reaches every process of the terminal. It is ignored here, from the first line of `_BOOTSTRAP` on: the
    # launcher alone reacts to it.
    _keep_from_children(report_descriptor, launcher_pipe)
    die_with_parent(task.parent_pid)
    may_exit = threading.Event()
    threading.Thread(target=_watch_launcher, args=(launcher_pipe, may_exit), daemon=True).start()
    sys.argv[:] = task.argv
    report = _run(task)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    with os.fdopen(report_descriptor, "wb") as report_pipe:
        send_report(report_pipe, report)
    if report.result is not None:
        # Tear down together: to a worker that still communicates, one that has torn down looks like a lost one.
        if not may_exit.wait(_LAST_CALLS_SECONDS):
            send_exit_notices()  # or who still calls for this one, as in an evaluation on rank 0 alone, would wait
            may_exit.wait()
        destroy_process_group()


def _keep_from_children(*descriptors: int) -> None:
    """Let no process that the function starts hold the launcher's pipes open."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed already
                os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def _watch_launcher(launcher_pipe: int, may_exit: threading.Event) -> None:
    """Wait for the launcher's leave to end, a byte; or end at once when it is gone, which closes the pipe.

    The second is for systems without a kernel that does it by itself (`die_with_parent`).
    """
    if os.read(launcher_pipe, 1):
        may_exit.set()
    else:
        os._exit(1)


def _run(task: WorkerTask) -> Report:
    try:
        run = _set_up(task)
        function, args, kwargs = pickle.loads(task.call)  # noqa: S301 - from our parent, as above
        result = function(run, *args, **kwargs)
        packed = pack_result(result)
    except BaseException as error:  # noqa: BLE001 - it is reported to the launcher, SystemExit included
        failed_at = time.monotonic()  # first of all, for it says who was the cause
        report = _failure(task.rank, error, failed_at)
        report_failure(error)
        return report
    return Report(rank=task.rank, time=time.monotonic(), result=packed, reason="", traceback="", error=None)


def _set_up(task: WorkerTask) -> Run:
    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(
        "127.0.0.1",
        task.store_port,
        is_master=False,
        timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS),
    )
    init_process_group(choose_backend(device), store=store, rank=task.rank, world_size=task.world_size)
    seed_generators(task.seed)
    return Run(rank=task.rank, world_size=task.world_size, local_rank=task.rank, device=device)


def _failure(rank: int, error: BaseException, failed_at: float) -> Report:
    try:
        packed = pack(error)
        pickle.loads(packed)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever a user's exception does when pickled, its text is still sent
        packed = None
    # The first frame is this module's; a reader wants their own.
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return Report(
        rank=rank,
        time=failed_at,
        result=None,
        reason="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
        error=packed,
    )
