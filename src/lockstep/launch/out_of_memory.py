"""Whether the kernel's out-of-memory killer has killed processes during a launch: its counters before and after."""

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.exits import UNKNOWN_KILLER

_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the out-of-memory killer has killed; None where that cannot be read."""

    group: int | None
    """Because this process' control group, such as a container, reached its memory limit."""
    host: int | None
    """On the whole host, for any reason."""


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    return OomKills(group=_read_group(root), host=_read_counter(root / "proc/vmstat"))


def name_killer(before: OomKills, after: OomKills) -> str:
    """Return who sent a SIGKILL between two readings, as far as the counters show."""
    if None not in (before.group, after.group) and before.group != after.group:
        return (
            "by the kernel's out-of-memory killer: the memory limit of this control group (container, job) is reached"
        )
    if None in (before.host, after.host):
        return UNKNOWN_KILLER
    if before.host != after.host:
        return "probably by the kernel's out-of-memory killer, which killed processes on this host meanwhile"
    return "by another process: the kernel's out-of-memory killer has killed nothing meanwhile"


def _read_group(root: Path) -> int | None:
    """Read the counter of version 2 of control groups (memory.events), or of version 1 (memory.oom_control)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    mounted = root / "sys/fs/cgroup"
    # In a container /sys/fs/cgroup is often the container's own group, but the path begins at the host's root.
    for folder, name in (
        (mounted / groups.get("", ""), "memory.events"),
        (mounted, "memory.events"),
        (mounted / "memory" / groups.get("memory", ""), "memory.oom_control"),
        (mounted / "memory", "memory.oom_control"),
    ):
        if (count := _read_counter(folder / name)) is not None:
            return count
    return None


def _read_counter(path: Path) -> int | None:
    try:
        found = _COUNTER.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
