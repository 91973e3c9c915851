"""Where a process records: the run directory, its launcher's choice, or a folder of this user alone."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.launch.sessions import launch_recorded
from lockstep.recording import LAUNCHER, WorkerRecorder, new_recording, open_recorder
from lockstep.recording.reading import read_recording
from lockstep.recording.stacks import request_stacks
from lockstep.recording.writing import make_private_recording, private_folder, remove_if_over, remove_oldest
from lockstep.settings import Settings, recording_variable


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def open_in(directory: Path, worker: int = 0) -> bool:
    recorder = WorkerRecorder()
    return open_recorder(recorder, directory, worker=worker, rank=worker, world_size=1, capacity=256)


def test_a_folder_that_others_could_read_or_make_is_not_used(tmp_path: Path) -> None:
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        private_folder()
    assert new_recording(None) is None


def test_old_recordings_of_jobs_that_are_gone_are_removed() -> None:
    own = make_private_recording(f"20260101-000000-{os.getpid()}")
    for number in range(40):
        made = make_private_recording(f"20260101-000000-{10**8 + number}")
        os.utime(made, (number, number))
    os.utime(own, (0, 0))
    make_private_recording("last-1")
    remove_oldest()
    names = {each.name for each in private_folder().iterdir()}
    assert own.name in names
    assert f"20260101-000000-{10**8 + 39}" in names
    assert len(names) <= 23


def test_each_start_of_a_worker_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(10):
        assert open_in(tmp_path / "recording")
    assert open_in(tmp_path / "recording", LAUNCHER)
    found = read_recording(tmp_path / "recording")
    assert [each.header.worker for each in found] == [0] * 8 + [LAUNCHER]


def test_without_a_place_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not open_in(tmp_path / "file" / "recording")


def test_settings() -> None:
    default = Settings({}).recording()
    assert (default.is_wanted, default.directory, default.capacity) == (True, "", 16384)
    off = Settings({"LOCKSTEP_RECORDING": "off"}).recording()
    assert (off.is_wanted, off.is_kept, off.capacity) == (True, False, 512)  # for the stall watch
    assert not Settings({"LOCKSTEP_RECORDING": "off", "LOCKSTEP_STALL_SECONDS": "0"}).recording().is_wanted
    for given, capacity in ((" 1000 ", 1024), ("many", 16384), ("1", 256), (str(1 << 40), 1 << 24)):
        assert Settings({"LOCKSTEP_RECORDING_EVENTS": given}).recording().capacity == capacity
    assert Settings({"LOCKSTEP_STALL_SECONDS": "-3"}).stall_seconds() == 0
    ours = recording_variable("/a,b")
    assert Settings(ours).recording().directory == ""  # this process is not its own child
    (name,) = ours
    assert Settings({name: f"{os.getppid()},/a,b"}).recording().directory == "/a,b"


def test_what_is_not_kept_is_removed_with_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RECORDING", "off")
    recording = new_recording(tmp_path / "run")
    assert recording is not None
    assert recording.parent == private_folder()
    with launch_recorded(recording, 1):
        assert open_in(recording)
        assert len(read_recording(recording)) == 2
    assert list(private_folder().iterdir()) == []
    assert not (tmp_path / "run").exists()


def test_launches_of_one_second_record_in_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first to end deleted what the other one wrote.
    monkeypatch.setenv("LOCKSTEP_RECORDING", "off")
    first, second = new_recording(None), new_recording(None)
    assert first is not None
    assert second is not None
    with launch_recorded(second, 1):
        with launch_recorded(first, 1):
            pass
        assert not first.exists()
        assert open_in(second)


def test_what_is_not_kept_is_removed_by_its_last_worker(tmp_path: Path) -> None:
    recorders = [WorkerRecorder() for _ in range(2)]
    for rank, recorder in enumerate(recorders):
        assert open_recorder(recorder, tmp_path / "job", worker=rank, rank=rank, world_size=2, capacity=256)
    for recorder in recorders:
        remove_if_over(tmp_path / "job")
        assert (tmp_path / "job").exists()
        recorder.close()
    remove_if_over(tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_a_script_whose_recording_is_not_kept_leaves_none(tmp_path: Path) -> None:
    script = "import lockstep, os\nfrom lockstep.recording import *\nassert ensure_own_recorder(0, 2)\n"
    script += "print(len(os.listdir(own_recorder().directory)))"
    environment = {**os.environ, "LOCKSTEP_RECORDING": "off", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0
    assert list(private_folder().iterdir()) == []


def test_a_process_writes_its_stacks_when_it_is_asked(tmp_path: Path) -> None:
    number = int(signal.SIGRTMIN) + 7
    before = signal.getsignal(number)
    assert open_in(tmp_path)
    (found,) = read_recording(tmp_path)
    if before is signal.SIG_DFL:
        assert found.header.stack_signal == number
        text = request_stacks(found.path.with_suffix(".stacks"), os.getpid(), number, 5.0)
        assert "test_a_process_writes_its_stacks_when_it_is_asked" in text
