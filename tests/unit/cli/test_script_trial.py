"""`lockstep check --run`: a job is ended after some steps, and what it said is kept."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.check import try_script

JOB = """
import sys, tempfile, time, lockstep_command
lockstep_command._put_off_package_init()
from pathlib import Path
from lockstep.recording import EventKind, WorkerRecorder, open_recorder
workers = [WorkerRecorder() for _ in range(2)]
for rank, worker in enumerate(workers):
    folder = Path(tempfile.gettempdir()) / "lockstep-1" / "job"
    open_recorder(worker, folder, worker=rank, rank=rank, world_size=2, capacity=64)
    for _ in range(3 + rank):
        worker.end(worker.begin(EventKind.BACKWARD, 0, 0, 0))
for rank in range(2):
    print(f"[rank {rank}] train.py:3: UserWarning: The ranks train on other numbers of samples.", file=sys.stderr)
print("[rank 0] epoch 1", file=sys.stderr, flush=True)
if sys.argv[1] == "goes on":
    time.sleep(1000)
sys.exit("error: Worker 1 failed first")
"""
"""What `lockstep run` leaves of a script with the wrapper."""


def start_instead(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start_process = subprocess.Popen

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[1:5] == ["-m", "lockstep", "run", "--drop-in"]
        return start_process([sys.executable, "-c", JOB, how], **options)

    monkeypatch.setattr(subprocess, "Popen", start)


def test_a_script_without_end_is_ended_when_each_worker_has_taken_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("goes on", monkeypatch)
    trial = try_script(Path("train.py"), 3)
    assert (trial.num_steps, trial.exit_code) == (3, None)
    assert trial.said == ("train.py:3: UserWarning: The ranks train on other numbers of samples.",)


def test_a_script_that_ends_before_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead("ends", monkeypatch)
    trial = try_script(Path("train.py"), 100)
    assert trial.exit_code == 1
    assert trial.said[-1] == "error: Worker 1 failed first"
