"""Other processes of this machine that take its cores: of other jobs, and of other users."""

import os
import pwd
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_FEWEST_CORES: Final = 0.5
"""With less than this together they are not mentioned."""
_LEAST: Final = 0.1
"""A process that uses less of a core is not one of them."""
_MOST_NAMES: Final = 3


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """What a process has used since it began."""

    parent: int
    ticks: int
    """Time on cores, in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A process that is not of the job."""

    pid: int
    user: str
    """Who runs it; a number where the name is not known."""
    program: str
    """Its program, without arguments."""
    cores: float
    """How many cores it uses."""


def read_process_times() -> dict[int, ProcessTimes]:
    """Return what each process that can be seen from here has used (local)."""
    found: dict[int, ProcessTimes] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            found[int(folder.name)] = ProcessTimes(int(words[1]), int(words[11]) + int(words[12]))
    return found


def find_neighbours(
    before: Mapping[int, ProcessTimes], after: Mapping[int, ProcessTimes], seconds: float, job: Collection[int]
) -> list[Neighbour]:
    """Return the processes outside a job that used cores between two looks, the busiest first (local).

    What the processes of `job` have started is of the job too; `seconds` is the time between the looks.
    """
    found = []
    for pid, times in after.items():
        if pid not in before or _is_of(pid, after, job):
            continue
        cores = (times.ticks - before[pid].ticks) / _TICKS_PER_SECOND / seconds
        if cores >= _LEAST:
            found.append(Neighbour(pid=pid, user=_user(pid), program=_program(pid), cores=cores))
    return sorted(found, key=lambda each: -each.cores)


def describe_neighbours(neighbours: Sequence[Neighbour], num_cores: int) -> str:
    """Return a line on what other processes use; empty if that is little."""
    total = sum(each.cores for each in neighbours)
    if total < _FEWEST_CORES:
        return ""
    named = [f"{each.program} (process {each.pid} of {each.user}) {each.cores:.1f}" for each in neighbours]
    more = f", and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    return (
        f"Other processes on this machine use {total:.1f} of its {num_cores} cores: "
        f"{', '.join(named[:_MOST_NAMES])}{more}."
    )


def _is_of(pid: int, processes: Mapping[int, ProcessTimes], job: Collection[int]) -> bool:
    while pid in processes:
        if pid in job:
            return True
        pid = processes[pid].parent
    return False


def _user(pid: int) -> str:
    try:
        number = Path(f"/proc/{pid}").stat().st_uid
        return pwd.getpwuid(number).pw_name
    except OSError:  # it has ended
        return "?"
    except KeyError:
        return str(number)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"
