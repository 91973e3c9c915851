"""The child: takes an assignment, joins the group, runs the function, reports. Runs in the worker process only."""

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
from lockstep.launch.messages import Assignment, Report, Run, pack_result, write_up
from lockstep.launch.pickling import pack
from lockstep.processes.lifetime import die_with_parent, keep_freed_memory
from lockstep.processes.reproducibility import seed_generators

_RENDEZVOUS_SECONDS = 300
_LINGER_SECONDS = 2.0
"""How long the others' last calls may take after this worker's own; more than they need."""


def main(downward: BinaryIO, report_descriptor: int, lifeline_descriptor: int) -> None:
    """Run one worker from start to end.

    Args:
        downward: Where the assignment comes from, the search path already read off.
        report_descriptor: Where the report goes.
        lifeline_descriptor: A pipe that the launcher holds open as long as it lives.
    """
    try:
        assignment: Assignment = pickle.loads(downward.read())  # noqa: S301 - from our parent, over a pipe only we hold
    except (EOFError, pickle.UnpicklingError):  # the launcher was interrupted while it sent it
        sys.exit(1)
    downward.close()
    # Ctrl-C reaches every process of the terminal, and is ignored here from the first line on (see the launcher's
    # bootstrap): what to do about it is the launcher's decision alone.
    _keep_from_children(report_descriptor, lifeline_descriptor)
    die_with_parent(assignment.parent_pid)
    released = threading.Event()
    threading.Thread(target=_watch_launcher, args=(lifeline_descriptor, released), daemon=True).start()
    sys.argv[:] = assignment.argv
    report = _run(assignment)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the function may have closed it
            stream.flush()
    with os.fdopen(report_descriptor, "wb") as upward:
        write_up(upward, report)
    if report.result is not None:
        # Leave together: a worker that tears down while another still communicates would look like a lost one.
        if not released.wait(_LINGER_SECONDS):
            send_exit_notices()  # or who still calls for this one, as in an evaluation on rank 0 alone, would wait
            released.wait()
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


def _watch_launcher(lifeline_descriptor: int, released: threading.Event) -> None:
    """Wait for the launcher's leave to end, a byte; or end at once when it is gone, which closes the pipe.

    The second is for systems without a kernel that does it by itself (`die_with_parent`).
    """
    if os.read(lifeline_descriptor, 1):
        released.set()
    else:
        os._exit(1)


def _run(assignment: Assignment) -> Report:
    try:
        run = _set_up(assignment)
        function, args, kwargs = pickle.loads(assignment.call)  # noqa: S301 - from our parent, as above
        result = function(run, *args, **kwargs)
        packed = pack_result(result)
    except BaseException as error:  # noqa: BLE001 - it is reported to the launcher, SystemExit included
        failed_at = time.monotonic()  # first of all, for it says who was the cause
        report = _failure(assignment.rank, error, failed_at)
        report_failure(error)
        return report
    return Report(rank=assignment.rank, time=time.monotonic(), result=packed, reason="", traceback="", error=None)


def _set_up(assignment: Assignment) -> Run:
    torch.set_num_threads(assignment.threads)
    device = torch.device(assignment.device)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(
        "127.0.0.1",
        assignment.store_port,
        is_master=False,
        timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS),
    )
    init_process_group(choose_backend(device), store=store, rank=assignment.rank, world_size=assignment.world_size)
    seed_generators(assignment.seed)
    return Run(rank=assignment.rank, world_size=assignment.world_size, local_rank=assignment.rank, device=device)


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
