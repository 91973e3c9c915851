"""Too few file descriptors, or no current directory, are an error before any process is started."""

import resource
from pathlib import Path

import psutil
import pytest

from lockstep.errors import UsageError
from lockstep.launch.launcher import launch
from lockstep.launch.sessions import check_descriptors


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


def test_a_current_directory_that_was_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each worker ended in "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so".
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="The current directory was deleted"):
        launch(print, devices="cpu:2")
