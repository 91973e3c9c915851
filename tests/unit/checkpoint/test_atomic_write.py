"""What a killed writer has left is removed by the next one of the same file; what another writes is not."""

import os
from pathlib import Path

import pytest

from lockstep.checkpoint.atomic_write import atomic_replace, atomic_write, remove_stale_temp_files


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
