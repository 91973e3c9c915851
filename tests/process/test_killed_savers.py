"""Processes that are killed while they save, and disks that do not take a checkpoint: what is there afterwards.

A child is forked, ready to save at once, and killed by a real SIGKILL or by a signal of the kernel's.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.atomic_write import atomic_write, remove_stale_temp_files
from lockstep.checkpoint.file import load_checkpoint, save_checkpoint, state_digest
from lockstep.checkpoint.manifest import Checkpoint, Manifest
from lockstep.checkpoint.saver import Saver
from lockstep.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="its signals and file systems are Linux's"),
]

NUM_BYTES = 4 * 20_000


def state(value: float) -> Checkpoint:
    model = {
        "a": torch.full((10_000,), float(value)),
        "b": torch.full((10_000,), -float(value)),
        "steps": torch.tensor(3),
    }
    manifest = Manifest(
        epoch=0,
        step=0,
        global_step=int(value),
        num_shards=1,
        seed=0,
        digest=state_digest(model),
        optimizer=None,
        scheduler=None,
        config=None,
    )
    return Checkpoint(model=model, optimizer={"optimizer/c": torch.ones(7)}, manifest=manifest)


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked child; return the signal that killed it, or minus its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may leave a forked child
            os._exit(1)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def die_before_call(number: int) -> None:
    """Let this process be killed before its n-th call of those that change a file system."""
    calls = 0

    def hooked(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return count

    for name in ("open", "pwrite", "fsync", "replace", "rename", "unlink", "close"):
        setattr(os, name, hooked(getattr(os, name)))


def old_or_new(path: Path) -> float:
    """Return the value in a checkpoint, of which every byte is looked at."""
    read = load_checkpoint(path)
    value = float(read.model["a"][0])
    assert state_digest(read.model) == read.manifest.digest == state(value).manifest.digest
    return value


def test_a_kill_before_any_call_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.checkpoint.file._CHUNK_BYTES", 10_000)  # so that there are many writes
    path = tmp_path / "a.ckpt"
    outcomes: list[float] = []
    for number in range(1, 100):
        save_checkpoint(path, state(1))

        def save(number: int = number) -> None:
            die_before_call(number)
            save_checkpoint(path, state(2))

        if in_child(save) == 0:
            break
        outcomes.append(old_or_new(path))
        remove_stale_temp_files(tmp_path)
        assert names(tmp_path) == ["a.ckpt"]
    assert len(outcomes) >= 16  # as many calls as a save makes
    assert outcomes == sorted(outcomes)  # the old one up to the rename, the new one from there on
    assert set(outcomes) == {1, 2}


def test_a_kill_at_any_byte_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, state(1))

    def save_up_to(limit: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills a process that writes beyond it
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        save_checkpoint(path, state(2))

    for limit in (0, 1, 7, 8, 9, *random.Random(0).choices(range(NUM_BYTES), k=30), NUM_BYTES):
        assert in_child(partial(save_up_to, limit)) == signal.SIGXFSZ
        assert old_or_new(path) == 1
    remove_stale_temp_files(tmp_path)
    assert names(tmp_path) == ["a.ckpt"]


def test_a_kill_at_any_moment_of_a_background_save_leaves_whole_ones(tmp_path: Path) -> None:
    def save_on_and_on() -> None:
        with Saver() as saver:
            for step in range(1, 100_000):
                saver.save(tmp_path / f"{step % 3}.ckpt", state(step))

    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            save_on_and_on()
            os._exit(0)
        while not list(tmp_path.glob("*.ckpt")):  # the first child's first save
            time.sleep(0.01)
        time.sleep(random.uniform(0.01, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for path in tmp_path.glob("*.ckpt"):
            old_or_new(path)
    remove_stale_temp_files(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_leftover_goes_when_its_writer_is_dead_and_not_before(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with atomic_write(tmp_path / "a.ckpt") as descriptor:
            os.pwrite(descriptor, b"half", 0)
            os.write(writing, b"1")
            signal.pause()
        os._exit(1)
    assert os.read(reading, 1) == b"1"
    remove_stale_temp_files(tmp_path)
    left = names(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(left) == 1
    remove_stale_temp_files(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_loses_its_new_file_to_a_cleaner_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    flock = fcntl.flock
    lost: list[Path] = []

    def lose_the_first(descriptor: int, operation: int) -> None:
        if not lost:
            [path] = tmp_path.iterdir()
            path.unlink()
            lost.append(path)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lose_the_first)
    save_checkpoint(tmp_path / "a.ckpt", state(1))
    assert len(lost) == 1
    assert old_or_new(tmp_path / "a.ckpt") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 64 pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def refuses(folder: Path) -> str:
    with pytest.raises(CheckpointError, match=r"could not be written: .* intact. Free disk space") as refused:
        save_checkpoint(folder / "b.ckpt", state(2))
    return str(refused.value)


def test_a_full_disk_leaves_what_was_there(small_disk: Path) -> None:
    save_checkpoint(small_disk / "a.ckpt", state(1))
    (small_disk / "other").write_bytes(bytes(100_000))
    assert "No space left" in refuses(small_disk)
    assert names(small_disk) == ["a.ckpt", "other"]
    assert old_or_new(small_disk / "a.ckpt") == 1
    (small_disk / "other").unlink()
    save_checkpoint(small_disk / "b.ckpt", state(2))


def test_a_disk_that_became_read_only_leaves_what_was_there(small_disk: Path) -> None:
    save_checkpoint(small_disk / "a.ckpt", state(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "Read-only file system" in refuses(small_disk)
    assert old_or_new(small_disk / "a.ckpt") == 1


def test_a_directory_that_vanishes_in_the_middle_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    fsync = os.fsync

    def vanish(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(folder)

    monkeypatch.setattr(os, "fsync", vanish)
    assert "No such file" in refuses(folder)


def test_a_user_who_may_not_write_is_told(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    assert "Permission denied" in refuses(tmp_path)


SCRIPT = """
import sys, time, torch
from pathlib import Path
from lockstep.checkpoint.manifest import Checkpoint, Manifest
from lockstep.checkpoint.saver import Saver
manifest = Manifest(epoch=0, step=0, global_step=0, num_shards=1, seed=0, digest="", optimizer=None, scheduler=None,
                    config=None)
Saver().save(Path("a.ckpt"), Checkpoint(model={"w": torch.ones(9)}, optimizer={}, manifest=manifest),
             lambda path: (time.sleep(0.5), Path("after").touch()))
raise KeyboardInterrupt
"""


def test_a_program_that_ends_without_closing_waits_for_its_save(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, timeout=100, check=False)
    assert b"KeyboardInterrupt" in ended.stderr
    assert (tmp_path / "after").exists()
