"""What a killed writer has left is removed by the next one of the same file; what another writes is not."""

import os
from pathlib import Path

import pytest

from lockstep.checkpoint.atomic_write import atomic_write


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
