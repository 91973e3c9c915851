"""Checking, before any process is started, that the launcher may open as many file descriptors as it needs."""

import resource

import psutil

from lockstep.errors import UsageError, counted

_NUM_SPARE = 16
"""Descriptors that do not depend on the number of workers: the rendezvous, pipes while a process starts, imports."""


def check_descriptors(num_workers: int, num_per_worker: int) -> None:
    """Check that this process may open what it needs for its workers.

    Raises:
        UsageError: It may not.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + num_workers * num_per_worker + _NUM_SPARE
    if limit != resource.RLIM_INFINITY and needed > limit:
        needs = "needs" if num_workers == 1 else "need"
        raise UsageError(
            f"{counted(num_workers, 'worker')} {needs} {needed} file descriptors in the process that starts them, but "
            f"its limit is {limit} (`ulimit -n`). Raise the limit with `ulimit -n {needed}`, or start fewer "
            "workers. (LS121)"
        )
