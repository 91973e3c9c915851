"""Checking, before any process is started, what the launcher needs for its workers."""

import resource
from pathlib import Path

import psutil

from lockstep.errors import UsageError, counted

_NUM_SPARE = 16
"""Descriptors that do not depend on the number of workers: the rendezvous, pipes while a process starts, imports."""


def check_descriptors(num_workers: int, num_per_worker: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + num_workers * num_per_worker + _NUM_SPARE
    if limit != resource.RLIM_INFINITY and needed > limit:
        needs = "needs" if num_workers == 1 else "need"
        raise UsageError(
            f"{counted(num_workers, 'worker')} {needs} {needed} file descriptors in the process that starts them, but "
            f"its limit is {limit} (`ulimit -n`). Raise the limit with `ulimit -n {needed}`, or start fewer "
            "workers. (LS121)"
        )


def check_current_directory() -> None:
    """Check that the current directory exists: torch would end each worker in an error about another file."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "The current directory was deleted. Change to one that exists (`os.chdir`), and start again. (LS123)"
        ) from None
