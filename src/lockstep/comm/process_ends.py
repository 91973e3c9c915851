"""Noticing that processes of other ranks have ended, where ranks share no memory.

Each rank stores which process it is. Those on the same host, in the same namespace of processes, are watched by
descriptors, which cannot come to mean another process. Those of other hosts are not watched.
"""

import os
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed import Store

from lockstep.comm.stored_values import read_record, to_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    place: str
    """The boot of the kernel and the namespace that its number belongs to; empty if that is not known."""
    pid: int
    started: str
    """When it was started, in the kernel's units: distinguishes it from a later process of that number."""


@final
class ProcessEnds:
    """The processes of the other ranks of a group, as far as they can be watched."""

    def __init__(self, processes: Sequence[RankProcess], rank: int) -> None:
        self.pids = [process.pid for process in processes]
        self._descriptors: dict[int, int] = {}
        for peer, process in enumerate(processes):
            if peer != rank and process.place and process.place == processes[rank].place:
                with suppress(OSError):  # this kernel has no such descriptors, or the process has ended and was reaped
                    self._descriptors[peer] = os.pidfd_open(process.pid)
                    if _start_of(process.pid) != process.started:  # the number has come to mean another process
                        os.close(self._descriptors.pop(peer))
        weakref.finalize(self, _close, os.getpid(), self._descriptors)

    def find_ended(self, peers: Sequence[int] | None = None, seconds: float = 0.0) -> int | None:
        """Return a rank, of `peers` if given, whose process has ended; None if none does within `seconds`."""
        poll = select.poll()
        ranks = {self._descriptors[peer]: peer for peer in (peers or self._descriptors) if peer in self._descriptors}
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
    place = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        place = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return RankProcess(place=place, pid=os.getpid(), started=_start_of(os.getpid()))


def _start_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _close(pid: int, descriptors: dict[int, int]) -> None:
    if os.getpid() == pid:
        while descriptors:
            os.close(descriptors.popitem()[1])
