"""Detecting that a script starts its own workers, although `lockstep run` has started the script several times.

Under `lockstep run --workers 2` a script that calls torch.multiprocessing.spawn has two sets of processes. Each set
uses a rendezvous at an address that the script has chosen. They inherit TORCHELASTIC_USE_AGENT_STORE, which makes torch
expect that a launcher serves this rendezvous. So no process serves it, and all wait for 30 minutes.

The launcher detects this from outside. All of these conditions must hold for several seconds:

- no process has connected to the rendezvous of the launch;
- every worker has processes that multiprocessing has started, and none of these has or awaits a TCP connection;
- all processes of the launch sleep;
- connections are being refused on this host.

Other workers with idle child processes fail one of them: a worker whose data-loading processes wait for work computes
itself, and the processes of an unrelated group have connections.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil

LOOK_SECONDS = 2.0
_NUM_LOOKS = 3
"""How many times in a row the conditions must hold."""
_MAX_CPU_SHARE = 0.1
"""The share of one core that all processes together may use; repeated attempts to connect use less."""
_WAITING = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_IDLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchActivity:
    is_every_worker_waiting: bool
    """Whether each worker has processes of multiprocessing without connections, and all processes sleep."""
    processes: frozenset[int]
    cpu_seconds: float
    num_refused: int
    """How many connections were refused on this host."""


@final
class NestingWatch:
    """Decides from repeated observations whether workers wait for a rendezvous that no process serves."""

    def __init__(self) -> None:
        self._last: LaunchActivity | None = None
        self._num_seen = 0

    def is_nested(self, activity: LaunchActivity, seconds: float) -> bool:
        """Take the next observation, `seconds` after the one before; return whether the script is certainly nested."""
        last, self._last = self._last, activity
        has_waited = (
            last is not None
            and last.is_every_worker_waiting
            and activity.is_every_worker_waiting
            and last.processes == activity.processes
            and activity.cpu_seconds - last.cpu_seconds < _MAX_CPU_SHARE * seconds
            and activity.num_refused > last.num_refused
        )
        self._num_seen = self._num_seen + 1 if has_waited else 0
        return self._num_seen >= _NUM_LOOKS


def look_at(workers: Sequence[int], root: Path = Path("/")) -> LaunchActivity:
    """Return what these processes, and those that they have started, do now."""
    families = _find_families(workers)
    everyone = [process for family in families for process in family]
    return LaunchActivity(
        is_every_worker_waiting=all(map(_is_waiting_for_others, families)) and all(map(_sleeps, everyone)),
        processes=frozenset(process.pid for process in everyone),
        cpu_seconds=sum(map(_cpu_seconds, everyone)),
        num_refused=_read_num_refused(root),
    )


def describe_nesting(num_workers: int, script: str) -> str:
    return (
        "error: the script starts its own workers, as torch.multiprocessing.spawn does, but lockstep run has started "
        f"it {num_workers} times. The workers of each copy wait for a rendezvous that no process serves, and none has "
        f"joined that of lockstep run. Start the script once, with `python {script}` or with --workers 1; or let it "
        "call init_process_group in the process that lockstep run starts, which has RANK and WORLD_SIZE."
    )


def _find_families(workers: Sequence[int]) -> list[list[psutil.Process]]:
    """Return for each worker the processes of its session: itself, if it has not ended, and all that it has started."""
    families: dict[int, list[psutil.Process]] = {worker: [] for worker in workers}
    for pid in sorted(psutil.pids(), key=lambda pid: pid not in families):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            if (session := os.getsid(pid)) in families:
                families[session].append(psutil.Process(pid))
    return list(families.values())


def _is_waiting_for_others(family: Sequence[psutil.Process]) -> bool:
    """Whether multiprocessing has started processes here, and none of them is connected to anything."""
    with contextlib.suppress(psutil.Error):
        forked = family[0].cmdline() if family else []
        spawned = [
            process
            for process in family[1:]
            if "--multiprocessing-fork" in (command := process.cmdline()) or command == forked
        ]
        return bool(spawned) and not any(map(_has_connection, spawned))
    return False


def _has_connection(process: psutil.Process) -> bool:
    states = {connection.status for connection in process.net_connections("tcp")}
    return bool(states & {psutil.CONN_ESTABLISHED, psutil.CONN_LISTEN})


def _sleeps(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in _WAITING
    return False


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _read_num_refused(root: Path) -> int:
    """Read the kernel's counter of connections that failed (Linux; elsewhere it stays 0)."""
    with contextlib.suppress(OSError, ValueError):
        names, values = (
            line.split() for line in (root / "proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("AttemptFails")])
    return 0
