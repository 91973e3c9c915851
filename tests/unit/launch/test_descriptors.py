"""Too few file descriptors are an error before any process is started."""

import resource

import psutil
import pytest

from lockstep.errors import UsageError
from lockstep.launch.descriptors import check_descriptors
from lockstep.launch.launcher import launch


def test_too_many_workers_for_the_limit_are_refused_before_they_start() -> None:
    # Half of them had started when the launcher failed with "Too many open files".
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 40, hard))
    try:
        check_descriptors(2, 4)
        with pytest.raises(
            UsageError, match=r"16 workers need \d+ file descriptors .* Raise the limit with `ulimit -n \d+`"
        ):
            launch(print, devices="cpu:16")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
