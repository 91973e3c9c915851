"""How many cores and how much memory this process may use: the machine's, within CPU affinity and cgroup limits.

Control groups limit a container or a cluster's job. The numbers of cores and bytes that the kernel reports for the
machine do not include these limits. Version 2 of control groups is read.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def count_cores(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int:
    """Return how many cores this process may use, 1 or more."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = psutil.cpu_count() or 1
    for folder in _own_groups(membership, groups):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            cores = min(cores, max(quota // period, 1))
    return cores


def measure_memory(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> tuple[int, int]:
    """Return how much main memory this process may use, and how much of that is left, in bytes."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _own_groups(membership, groups):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _own_groups(membership: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process' control group and of its parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
    if own is not None:
        folder = groups / own
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(groups)))
