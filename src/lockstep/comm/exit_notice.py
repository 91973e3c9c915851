"""Reporting to the other ranks that this one exits, and why, so that their errors name the reason."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import cast, final

import torch.distributed as dist

from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.processes.ending import exit_quickly
from lockstep.torch_private.groups import list_groups

_END_SECONDS = 5.0
"""How long the end of a process may take after an exception before it is said what holds it up."""
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def send_exit_notices() -> None:
    """Report to the other ranks of every group of this process that it makes no more calls (local).

    A rank that still needs this one raises at once, not after the timeout. Groups of torch's own backends
    send nothing.
    """
    if dist.is_available() and dist.is_initialized():
        for group in list_groups():
            if capabilities_of(group).reports_exits:
                cast("ReportsExits", group).send_exit_notice()


def report_failure(error: BaseException) -> None:
    """Report to the other ranks of every group of this process that it exits because of `error` (local).

    Only the first report counts. Groups of torch's own backends, unless made with `check=True`, send nothing.
    """
    if dist.is_available() and dist.is_initialized():
        for group in list_groups():
            if capabilities_of(group).reports_exits:
                cast("ReportsExits", group).report_failure(error)


def report_uncaught_exceptions() -> None:
    """Report an uncaught exception to the other ranks; calling this again changes nothing (local)."""
    if not isinstance(sys.excepthook, _ReportThenShow):
        sys.excepthook = _ReportThenShow(sys.excepthook)


@final
class _ReportThenShow:
    """An except hook that reports the exception to the other ranks and then calls the previous hook."""

    def __init__(self, previous: ExceptHook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report_failure(error)
        self._previous(kind, error, traceback)
        exit_quickly()  # its launcher, and the other ranks, wait for its end
        threading.Thread(target=_tell_if_running, name="waits for the end", daemon=True).start()


def _tell_if_running() -> None:
    """Say what holds the end of this process up, if anything does: its launcher waits for it."""
    time.sleep(_END_SECONDS)
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    what = f"thread {', '.join(map(repr, threads))}, which is no daemon," if threads else "a handler of atexit"
    with suppress(OSError, ValueError):
        sys.stderr.write(
            f"Process {os.getpid()} has raised the exception above and still runs, {_END_SECONDS:g} s later: {what} "
            "holds it up. (LS605)\n"
        )
        sys.stderr.flush()
