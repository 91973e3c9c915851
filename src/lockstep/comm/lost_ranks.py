"""Finding lost ranks, also while a device waits, and reporting why this one exits, for the errors of the others.

A call of NCCL returns when its kernel is queued, and `wait` only queues a wait. So the host does not notice a lost
rank: it blocks later, where it reads a value, until the backend's own timeout ends the process. Each group with such a
backend therefore has a thread that watches the other ranks:

    thread                                            the thread that reads a value
    ------                                            -----------------------------
                                                      1 blocks: the kernel waits for a rank that was killed
    2 finds that the rank is lost
    3 marks the group as broken, for this rank and
      the others on this host
    4 aborts the backend: its kernels end             5 returns; `raise_if_broken` raises PeerLostError

The value that step 5 reads is not valid. So whoever reads a result on a device calls `raise_if_broken` before using it.
"""

import errno
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, cast, final

import torch.distributed as dist
from torch.distributed import Store, Work

from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.open_calls import has_ended
from lockstep.comm.stored_values import read_record, to_stored
from lockstep.errors import LockstepError, PeerLostError
from lockstep.explanations import codes_in
from lockstep.processes.ending import describe_held_up, exit_quickly
from lockstep.processes.forking import finalize_here
from lockstep.processes.host import boot_id, open_process, start_ticks
from lockstep.processes.user_line import end_at_user
from lockstep.settings import read_settings
from lockstep.torch_private.groups import list_groups

_LOGGER = logging.getLogger("lockstep")
_END_WORDS: Final = ("connection", "peer", "socket", "pipe")
"""What errors of Gloo contain that come from the end of a connection. One of a call that took too long does not."""
_LOSS_WORDS: Final = (*_END_WORDS, "clos", "abort", "time")
"""What errors of torch's backends contain that may come from the loss of a rank, or from something else."""
EXIT_SECONDS: Final = 2.0
"""How long after such an error the end of a process may be seen, or what the launcher announces."""
ABORT_SECONDS: Final = 60.0
"""How long a backend may take to end the calls that a device is in."""
_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 0.5
"""How long a call may take that has everything it needs from a rank that has ended."""
_END_SECONDS = 5.0
"""How long the end of a process may take after an exception before it is said what holds it up."""
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


class WatchedRanks(Protocol):
    """The ranks of a group: over shared memory, or of several hosts."""

    def find_any_lost(self) -> PeerLostError | None:
        """Return the error for a rank that makes no more calls, if there is one."""

    def find_any_failed(self) -> PeerLostError | None:
        """Return the same for a rank that was killed or failed, and did not just leave the group."""

    def mark_broken(self, error: PeerLostError) -> None:
        """Let later calls raise the error, and publish it."""


@final
class DeviceWatch:
    """The thread that watches the ranks of one group; it starts with the first call on a device.

    Neither `ranks` nor `abort`, which ends the calls that the device is in, keeps the process group alive.
    """

    def __init__(self, ranks: WatchedRanks, abort: Callable[[], None]) -> None:
        self._ranks = ranks
        self._abort = abort
        self._stall_seconds = 0.0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: tuple[Work, str, float] | None = None

    def add(self, work: Work, call: str) -> None:
        """Watch a call; those before it on this device end before it does."""
        self._last = work, call, time.monotonic()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed.is_set():
                    self._stall_seconds = read_settings().stall_seconds()
                    self._thread = threading.Thread(
                        target=_watch, args=(weakref.ref(self), self._closed), name="lockstep-devices", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._last = None
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_POLL_SECONDS + _GRACE_SECONDS)
        self._abort = _abort_nothing  # whose owner has this, so that neither would be freed

    def look(self) -> bool:
        """Look once; return whether the watch is over, because the group is broken."""
        last = self._last
        if last is None:
            return False
        lost = self._ranks.find_any_lost()
        if lost is None:
            self._log_stall(last)
            return False
        if self._closed.wait(_GRACE_SECONDS):
            return True
        is_done = has_ended(last[0])
        if is_done and self._ranks.find_any_failed() is None:
            return False  # the rank left the group, and no call needs it
        self._ranks.mark_broken(lost)
        if not is_done:
            _LOGGER.error("%s did not end on the device. %s (LS203)", last[1], lost)
            self._abort()
        return True

    def _log_stall(self, last: tuple[Any, str, float]) -> None:
        work, call, started = last
        if not 0 < self._stall_seconds < time.monotonic() - started:
            return
        if has_ended(work):
            self._last = None
            return
        self._last = work, call, math.inf  # once
        _LOGGER.warning(
            "%s has not ended on the device after %g s. If it is one of the first calls: cards that cannot read each "
            "other's memory (an IOMMU, ACS) hang so; set NCCL_P2P_DISABLE=1, and see `lockstep devices --test`. Else "
            "look for a branch or a loop that differs between ranks. (LOCKSTEP_STALL_SECONDS sets after how many "
            "seconds this is logged.) (LS215)",
            call,
            self._stall_seconds,
        )


def _abort_nothing() -> None:
    """Stand for the backends of a watch that is over."""


def _watch(watch: "weakref.ref[DeviceWatch]", closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        target = watch()
        if target is None or target.look():
            return
        del target


def may_come_from_loss(error: BaseException) -> bool:
    """Return whether the error of one of torch's backends may come from the loss of a rank, by its words."""
    return any(word in str(error).lower() for word in _LOSS_WORDS)


def says_connection_ended(error: BaseException) -> bool:
    """Return whether an error of Gloo says that a connection has ended, which a rank that is only late does not do."""
    return any(word in str(error).lower() for word in _END_WORDS)


def send_exit_notices() -> None:
    """Report to the other ranks of every group of this process that it makes no more calls (local).

    A rank that still needs this one raises at once, not after the timeout. Groups of torch's own backends
    send nothing.
    """
    for group in _groups_that_report():
        group.send_exit_notice()


def report_failure(error: BaseException) -> None:
    """Report to the other ranks of every group of this process that it exits because of `error` (local).

    Only the first report counts. Groups of torch's own backends, unless made with `check=True`, send nothing.
    """
    for group in _groups_that_report():
        group.report_failure(error)


def _groups_that_report() -> list[ReportsExits]:
    groups = list_groups() if dist.is_available() and dist.is_initialized() else []
    return [cast("ReportsExits", group) for group in groups if capabilities_of(group).reports_exits]


def report_uncaught_exceptions() -> None:
    """Report an uncaught exception to the other ranks; calling this again changes nothing (local)."""
    if not isinstance(sys.excepthook, _ReportThenShow):
        sys.excepthook = _ReportThenShow(sys.excepthook)


@final
class _ReportThenShow:
    def __init__(self, previous: ExceptHook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        report_failure(error)
        if isinstance(error, LockstepError) and codes_in(str(error)):  # it says what to do
            end_at_user(traceback)
        self._previous(kind, error, traceback)
        exit_quickly()  # its launcher, and the other ranks, wait for its end
        if read_settings().channel() is None:  # else the launcher tells, and ends it
            threading.Thread(target=_tell_if_running, name="waits for the end", daemon=True).start()


def _tell_if_running() -> None:
    """Say what holds the end of this process up, if anything does: its launcher waits for it."""
    time.sleep(_END_SECONDS)
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    with suppress(OSError, ValueError):
        sys.stderr.write(
            f"Process {os.getpid()} has raised the exception above and still runs, {_END_SECONDS:g} s later: "
            f"{describe_held_up(threads)} holds it up. (LS605)\n"
        )
        sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    place: str
    """The boot of the kernel and the namespace that its number belongs to; empty if that is not known."""
    pid: int
    started: int
    """When it was started, in the kernel's ticks: distinguishes it from a later process of that number."""


@final
class ProcessEnds:
    """The processes of the other ranks of a group, as far as they can be watched, where ranks share no memory.

    Those on the same host, in the same namespace of processes, are watched by descriptors, which cannot come to mean
    another process. Those of other hosts are not watched.
    """

    def __init__(self, processes: Sequence[RankProcess], rank: int) -> None:
        self.pids = [process.pid for process in processes]
        self._descriptors: dict[int, int] = {}
        for peer, process in enumerate(processes):
            if peer != rank and process.place and process.place == processes[rank].place:
                try:
                    self._descriptors[peer] = open_process(process.pid, process.started)
                except ProcessLookupError:
                    self._descriptors[peer] = os.eventfd(1)  # which can be read, too
                except OSError as error:
                    if error.errno not in {errno.ENOSYS, errno.EPERM}:  # this kernel has none, or a sandbox allows none
                        self.close()
                        raise
        finalize_here(self, _close, self._descriptors)

    def close(self) -> None:
        """Watch none of them any more."""
        _close(self._descriptors)

    def find_ended(self, peers: Sequence[int] | None = None, seconds: float = 0.0) -> int | None:
        """Return a rank, of `peers` if given, whose process has ended; None if none does within `seconds`."""
        poll = select.poll()
        asked = self._descriptors if peers is None else peers
        ranks = {self._descriptors[peer]: peer for peer in asked if peer in self._descriptors}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        return min(ranks[descriptor] for descriptor, _ in ready) if ready else None


def exchange_processes(store: Store, rank: int, size: int) -> ProcessEnds:
    """Find the processes of all ranks, by a store of this group alone (collective)."""
    keys = [f"process/{peer}" for peer in range(size)]
    store.set(keys[rank], to_stored(own_process()))
    return ProcessEnds([read_record(key, store.get(key), RankProcess) for key in keys], rank)


def own_process() -> RankProcess:
    boot, place = boot_id(), ""
    if boot:
        with suppress(OSError):
            place = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return RankProcess(place=place, pid=os.getpid(), started=start_ticks(os.getpid()))


def _close(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
