"""The doctor looks at processes that run, stand still or are gone, without torch and without changing them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.doctor import finding
from lockstep.doctor.examination import examine
from lockstep.doctor.finding import find_recording
from lockstep.doctor.report import chrome_trace, print_examination, to_json
from lockstep.errors import UsageError
from lockstep.recording.reading import read_recording

WORKER = """
import sys, time, lockstep_command
lockstep_command._put_off_package_init()
from pathlib import Path
from lockstep.recording import EventKind, open_recorder, own_recorder
rank, awaited = int(sys.argv[2]), int(sys.argv[3])
recorder = own_recorder()
open_recorder(recorder, Path(sys.argv[1]), worker=rank, rank=rank, world_size=2, capacity=256)
if len(sys.argv) > 4:
    recorder.set_place(0, 1, int(sys.argv[4]))
recorder.set_step(5)
if awaited < -1:
    pass
elif awaited >= 0:
    text = recorder.text("all_reduce(sum)")
    recorder.begin(EventKind.COLLECTIVE, 3, 0, text)
    recorder.begin(EventKind.WAITING, awaited, 0, text)
else:
    recorder.begin(EventKind.SHARD, 1, 0, 0)
def users_function():
    print("ready", flush=True)
    time.sleep(100)
users_function()
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield two processes that record: rank 0 waits for rank 1."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, tmp_path / "recording", str(rank), str(awaited)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, awaited in ((0, 1), (1, -1))
    ]
    try:
        assert [process.stdout.readline() for process in started] == ["ready\n"] * 2
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_job_from_running_to_killed(tmp_path: Path, workers: list[subprocess.Popen[str]]) -> None:
    recording = find_recording(tmp_path)
    running = examine(recording, wants_stacks=True)
    assert running.verdict.kind == "running"
    assert [state.activity.doing for state in running.workers] == [
        "waits for rank 1 in all_reduce(sum)",
        "computes shard 1",
    ]
    assert [state.activity.step for state in running.workers] == [5, 5]
    assert all("in users_function" in running.stacks[rank] for rank in (0, 1))
    assert all(state.facts.memory_bytes > 2**20 for state in running.workers)

    workers[1].send_signal(signal.SIGSTOP)
    while not (found := examine(recording)).verdict.ranks:  # until the kernel has stopped it
        time.sleep(0.05)
    assert found.verdict.kind == "stalled"
    assert f"kill -CONT {workers[1].pid}" in found.verdict.advice
    values = json.loads(to_json(found))
    assert values["verdict"]["ranks"] == [1]
    assert values["workers"][0]["waits_for"] == [1]
    console = Console(width=200, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    print_examination(found, console, with_stacks=True)
    console.file.close()
    lines = console.export_text().splitlines()
    assert lines[0].startswith(f"Rank 1 (process {workers[1].pid}) is stopped")

    for process in workers:
        process.kill()
        process.wait()
    gone = examine(recording)
    assert gone.verdict.kind == "failed"
    assert "killed together" in gone.verdict.text

    trace = json.loads(chrome_trace(read_recording(recording)))["traceEvents"]
    names = {(event["pid"], event["name"]) for event in trace if event["ph"] == "X"}
    assert {(0, "waits for rank 1"), (1, "shard 1")} <= names
    assert all(event["dur"] >= 0 <= event["ts"] for event in trace if event["ph"] == "X")


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no recording"):
        find_recording(tmp_path)


@pytest.mark.usefixtures("workers")
def test_of_several_jobs_that_run_the_one_in_this_folder_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    (here / "runs" / "mine").symlink_to(tmp_path)  # which holds the recording of the workers
    monkeypatch.chdir(here)
    monkeypatch.setattr(finding, "private_folder", lambda: tmp_path / "elsewhere")
    later = [sys.executable, "-c", WORKER, tmp_path / "elsewhere" / "job", "0", "-1"]
    with subprocess.Popen(later, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert find_recording() == Path("runs/mine/recording")
            (here / "runs" / "mine").unlink()
            assert find_recording() == tmp_path / "elsewhere" / "job"
        finally:
            process.kill()


def test_after_a_loss_the_doctor_looks_at_those_that_continue(tmp_path: Path) -> None:
    # The lost worker hid that the other one stood still, and a new one that waits to join was taken for rank 0.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, tmp_path, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        for arguments in ((0, -1, 1), (1, -1), (2, -2, 0))
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        started[1].kill()
        started[1].wait()
        found = examine(tmp_path, stall_seconds=0.001)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [worker.pid for worker in found.workers] == [started[0].pid]
    assert found.verdict.kind == "stalled"
    # Once the job has ended, the lost one was named as the cause of its end, though it had ended well.
    assert [worker.pid for worker in examine(tmp_path).workers] == [started[0].pid]
