"""A real job that stands still says by itself who is the cause."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process import hosts, warm

SCRIPT = """
import torch, sys
import lockstep as parallel
import torch.distributed as dist

def users_function():
    torch.manual_seed(0)
    while True:
        pass

{setup}
model = parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
for step in range(3):
    model(torch.ones(2, 3)).sum().backward()
    if step == 1 and dist.get_rank() == 1:
        users_function()
"""

LOOP = r"script\.py:[789] in users_function"
"""Where the loop is; on a busy machine the line before it may take longer than the stall time."""


def test_an_infinite_loop_on_one_rank_is_named_with_its_line(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # The group of torch's makes no calls that are recorded: there the wrapper's own events tell who is behind.
    jobs = []
    for name, setup, kept in (
        ("our group", "parallel.init_process_group()", "on"),
        ("a group of torch's", "dist.init_process_group('gloo')", "on"),
        ("nothing kept", "parallel.init_process_group()", "off"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(SCRIPT.format(setup=setup))
        job = warm.PopenWithScripts(
            [str(Path(sys.executable).with_name("lockstep")), "run", "--workers", "2", "script.py"],
            cwd=tmp_path / name,
            env={**os.environ, "LOCKSTEP_STALL_SECONDS": "1", "LOCKSTEP_RECORDING": kept},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(job.wait)
        request.addfinalizer(job.kill)
        jobs.append(job)
    for job in jobs:
        said = read_until(job.stderr.readline, "in users_function")
        assert "The job stands still. Rank 1 (process " in said
        assert re.search(LOOP, said)
        assert "Rank 0: " in said
        job.stderr.close()


@pytest.mark.root
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_each_of_two_hosts_says_who_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(setup="parallel.init_process_group('gloo')"))
    job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": hosts.Hosts.address(0), "MASTER_PORT": "29400"}
    with hosts.Hosts(tmp_path, 2) as several:
        for rank in range(2):
            (tmp_path / f"{rank}").mkdir()
        started = [
            several.start(
                rank,
                str(tmp_path / "script.py"),
                # Hosts have folders of their own, and so recordings.
                variables={
                    **job,
                    "RANK": f"{rank}",
                    "TMPDIR": str(tmp_path / f"{rank}"),
                    "LOCKSTEP_STALL_SECONDS": "2",
                },
            )
            for rank in range(2)
        ]
        outputs = [process.stdout for process in started]
        assert outputs[0] is not None
        assert outputs[1] is not None
        said = read_until(outputs[0].readline, "The job stands still")
        assert "wait for rank 1, which is on another host" in said
        said = read_until(outputs[1].readline, "The job stands still")
        assert "Rank 1 (process " in said
        assert re.search(LOOP, said)
        # Not only after five times the stall time, as where nobody waits.
        assert f"For {2 * 5}" not in said


CRASH = """
import ctypes
import lockstep as ls

def users_function(run=None):
    ctypes.string_at(0)

if __name__ == "__main__":
    {way}
"""


@pytest.mark.parametrize("way", ["users_function()", "ls.launch(users_function, workers=1)"], ids=["run", "launch"])
def test_a_crash_in_native_code_is_reported_with_the_users_line(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(CRASH.format(way=way))
    job = warm.Popen(
        [str(Path(sys.executable).with_name("lockstep")), "run", "--workers", "1", "script.py"]
        if way == "users_function()"
        else [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = job.communicate(timeout=50)[1]
    assert "failed first: killed by SIGSEGV at " in said
    assert "script.py:6 in users_function (LS601)" in said


def read_until(read_line: Callable[[], str], part: str) -> str:
    while part not in (line := read_line()):
        assert line, "the job has ended"
    return line
