import gc
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.manifests import manifest
from torch import Tensor

from lockstep.checkpoint import saver as saver_module
from lockstep.checkpoint.atomic_write import atomic_replace, atomic_write, remove_stale_temp_files
from lockstep.checkpoint.file import load_checkpoint, state_digest
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.checkpoint.saver import Saver, StateCopy
from lockstep.errors import CheckpointError


def checkpoint(tensor: Tensor) -> Checkpoint:
    return Checkpoint(model={"w": tensor}, optimizer={"optimizer/m": tensor + 1}, manifest=manifest(digest=""))


def save_and_fail(saver: Saver, path: Path, error: type[BaseException] | None) -> None:
    with saver:
        saver.save(path, checkpoint(torch.ones(2)))
        if error is not None:
            raise error


class Gate:
    """Block a background save after its file was written, until the gate is opened."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self, path: Path, /) -> None:
        self.is_reached.set()
        assert self.is_open.wait(20)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, is_async: bool) -> None:
    weight = torch.zeros(1000)
    saved: list[Path] = []
    with Saver(is_async=is_async, on_saved=saved.append) as saver:
        for step in range(3):
            weight.fill_(step)
            saver.save(tmp_path / f"{step}.ckpt", checkpoint(weight))
            weight.fill_(-1)  # as the next step would
    assert [path.name for path in saved] == ["0.ckpt", "1.ckpt", "2.ckpt"]
    for step, path in enumerate(saved):
        read = load_checkpoint(path)
        assert set(read.model["w"].tolist()) == {step}
        assert set(read.optimizer["optimizer/m"].tolist()) == {step + 1}
        assert read.manifest.digest == state_digest(read.model)


def test_two_saves_never_overlap_and_a_long_wait_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    said: list[str] = []

    def warned(message: str, **_: object) -> None:
        if not said:
            assert not (tmp_path / "b.ckpt").exists()
        said.append(message)  # closing waits for the second save, and may warn again on a slow machine
        gate.is_open.set()  # so the second save has waited, however slow the machine is

    monkeypatch.setattr(warnings, "warn", warned)
    monkeypatch.setattr(saver_module, "_WARNING_SECONDS", 0.01)
    with Saver() as saver:
        saver.save(tmp_path / "a.ckpt", checkpoint(torch.ones(2)), gate)
        assert gate.is_reached.wait(20)
        saver.save(tmp_path / "b.ckpt", checkpoint(torch.ones(2)))
    assert "two saves never overlap" in said[0]
    assert (tmp_path / "b.ckpt").exists()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("at", ["save", "close"])
def test_a_failed_save_stops(tmp_path: Path, is_async: bool, at: str) -> None:
    saver = Saver(is_async=is_async)
    with pytest.raises(CheckpointError, match="could not be written"):  # noqa: PT012 - whichever call raises
        saver.save(tmp_path / "gone" / "a.ckpt", checkpoint(torch.ones(2)))
        if at == "save":
            saver.save(tmp_path / "b.ckpt", checkpoint(torch.ones(2)))
        saver.close()
    assert not list(tmp_path.iterdir())
    saver.close()  # the error is raised only once


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_save_may_only_warn(tmp_path: Path, is_async: bool) -> None:
    saver = Saver(is_async=is_async, on_error="warn")
    with pytest.warns(UserWarning, match=r"could not be written[^(]*The training continues [^(]*\(LS703\)$"):
        save_and_fail(saver, tmp_path / "gone" / "a.ckpt", None)
    saver.save(tmp_path / "b.ckpt", checkpoint(torch.ones(2)))
    saver.close()
    assert (tmp_path / "b.ckpt").exists()


def test_an_error_that_is_not_a_save_error_is_raised_in_any_case(tmp_path: Path) -> None:
    def fail(_: Path, /) -> None:
        raise KeyError("a mistake in a program")

    saver = Saver(on_error="warn")
    saver.save(tmp_path / "a.ckpt", checkpoint(torch.ones(2)), fail)
    with pytest.raises(KeyError):
        saver.close()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_save_is_finished_when_the_training_fails_and_its_error_does_not_hide_the_other(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        save_and_fail(Saver(), tmp_path / "a.ckpt", error)
    assert (tmp_path / "a.ckpt").exists()
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(error):
        save_and_fail(Saver(), tmp_path / "gone" / "a.ckpt", error)


def test_the_memory_of_the_copy_is_used_again() -> None:
    copy = StateCopy()
    first = copy.fill({"a": torch.ones(5), "b": torch.ones(3)})
    again = copy.fill({"a": torch.zeros(5), "b": torch.ones(4)})
    assert again["a"].data_ptr() == first["a"].data_ptr()
    assert again["a"].tolist() == [0] * 5
    assert again["b"].shape == (4,)


def test_tensors_of_any_accelerator_are_copied_without_a_wait_for_each() -> None:
    # Only those of CUDA were; the copy of another device's waited for each tensor.
    with asynchronous_device() as device:
        state = {name: torch.full((3,), value).to(device.name) for name, value in (("a", 1.0), ("b", 2.0))}
        before = len(device.waits)
        copies = StateCopy().fill(state)
        assert len(device.waits) == before + 1
        assert [copies[name].tolist() for name in state] == [[1.0] * 3, [2.0] * 3]


def test_no_memory_for_the_copy_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("you tried to allocate 1 TB")

    monkeypatch.setattr(StateCopy, "fill", no_memory)
    with pytest.raises(CheckpointError, match=r"could not be copied: you tried.*set async_save: false"):
        Saver().save(tmp_path / "a.ckpt", checkpoint(torch.ones(2)))


def test_a_save_is_slow_until_somebody_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lockstep.checkpoint.file._MIN_WORK_SECONDS", 0)
    monkeypatch.setattr("lockstep.checkpoint.file._PAUSE_PER_CPU_SECOND", 1e9)
    monkeypatch.setattr("lockstep.checkpoint.file._MAX_PAUSE_SECONDS", 1e6)  # until somebody waits
    with Saver() as saver:
        saver.save(tmp_path / "a.ckpt", checkpoint(torch.ones(1 << 20)))
        time.sleep(0.3)  # a save without pauses is done in less
        assert not (tmp_path / "a.ckpt").exists()
    assert (tmp_path / "a.ckpt").exists()


def test_without_another_thread_it_is_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    saver = Saver()
    saver.save(tmp_path / "a.ckpt", checkpoint(torch.ones(2)))
    assert load_checkpoint(tmp_path / "a.ckpt").model["w"].tolist() == [1, 1]
    saver.close()


def test_an_interruption_before_the_thread_starts_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_and_fail(Saver(), tmp_path / "a.ckpt", None)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux alone")
def test_the_background_is_of_low_priority_and_the_training_is_not(tmp_path: Path) -> None:
    found: list[int] = []
    with Saver() as saver:
        saver.save(tmp_path / "a.ckpt", checkpoint(torch.ones(2)), lambda _: found.append(os.nice(0)))
    assert found == [os.nice(0) + 10]


def status_bytes(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def highest_growth(work: Callable[[], None]) -> int:
    """Return by how many bytes this process grew while something ran, at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest is from now on
    before = status_bytes("VmRSS")
    work()
    return status_bytes("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of the highest memory on Linux alone")
@pytest.mark.parametrize(("is_async", "num_copies"), [(True, 1), (False, 0)])
def test_a_save_takes_memory_for_one_copy_of_the_state_at_most(
    tmp_path: Path, is_async: bool, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_WARNING_SECONDS", 100.0)
    model = {f"w{number}": torch.ones(1 << 20) for number in range(16)}
    state = Checkpoint(model=model, optimizer={}, manifest=checkpoint(torch.ones(1)).manifest)

    def save() -> None:
        with Saver(is_async=is_async) as saver:
            for _ in range(2):
                saver.save(tmp_path / "a.ckpt", state)

    size = 16 * (1 << 22)
    assert highest_growth(save) < (num_copies + 0.25) * size


def test_a_target_that_is_no_file_is_refused(tmp_path: Path) -> None:
    # A save to /dev/full once replaced the device.
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(FileExistsError, match="is not a regular file"), atomic_write(tmp_path / "pipe.ckpt"):
        pass
    assert stat.S_ISFIFO((tmp_path / "pipe.ckpt").stat().st_mode)


# -- Files are written whole or not at all -----------------------------------------------------------------------------


def temp_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(".*.tmp")}


@pytest.mark.parametrize("name", ["run.ckpt", "weights (1).pt"])
def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path: Path, name: str) -> None:
    left = f".{name}.{'a' * 32}.tmp"
    (tmp_path / left).touch()  # without a lock: its writer has ended
    with atomic_write(tmp_path / "other.ckpt") as descriptor:
        os.write(descriptor, b"other")
    assert temp_names(tmp_path) == {left}
    with atomic_write(tmp_path / name) as descriptor:
        of_living = temp_names(tmp_path)
        assert len(of_living) == 1
        assert left not in of_living
        with atomic_write(tmp_path / name) as second:
            os.write(second, b"second")
            assert of_living < temp_names(tmp_path)  # its writer is alive
        os.write(descriptor, b"first")
    assert temp_names(tmp_path) == set()
    assert (tmp_path / name).read_bytes() == b"first"


@pytest.mark.parametrize("name", [".rows-00002.npz", ".job.json", ".step-00000001.ckpt"])
def test_leftovers_of_any_file_of_ours_are_removed_from_a_folder(tmp_path: Path, name: str) -> None:
    # Those of predictions were not, and then their folder could not be removed.
    (tmp_path / f"{name}.{'a' * 32}.tmp").touch()
    (tmp_path / ".mine.2.tmp").touch()
    remove_stale_temp_files(tmp_path)
    assert temp_names(tmp_path) == {".mine.2.tmp"}


def test_a_file_that_others_write_by_its_name_is_left_alone(tmp_path: Path) -> None:
    with atomic_replace(tmp_path / "model.safetensors") as path:
        path.write_bytes(b"written")
        remove_stale_temp_files(tmp_path)  # as a training does in its run directory
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
