"""Cores and memory under control groups, which are files here."""

import os
from pathlib import Path

import psutil
import pytest

from lockstep.devices import inventory
from lockstep.devices.inventory import count_cores, measure_memory

CORES = len(os.sched_getaffinity(0))
MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the mount point of control groups, in which this process is in the group outer/inner."""
    (tmp_path / "membership").write_text("12:cpu:/old\n0::/outer/inner\n")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(inventory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(inventory, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def test_without_a_limit_cores_are_those_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_MEMBERSHIP", Path("nowhere"))
    assert count_cores() == CORES


@pytest.mark.parametrize(("limit", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", CORES)])
def test_a_limit_of_processor_time_is_a_limit_of_cores(groups: Path, limit: str, expected: int) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text(f"{limit}\n")
    assert count_cores() == expected


def test_the_groups_around_count_too(groups: Path) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (groups / "outer" / "cpu.max").write_text("100000 100000\n")
    assert count_cores() == 1
    (groups.parent / "cpu.max").write_text("1 100000\n")  # outside the mount point
    (groups / "outer" / "cpu.max").unlink()
    assert count_cores() == CORES


def test_a_limit_of_memory_counts_where_it_is_lower(groups: Path) -> None:
    (groups / "outer" / "memory.max").write_text(f"{64 * MIB}\n")
    (groups / "outer" / "memory.current").write_text(f"{24 * MIB}\n")
    (groups / "outer" / "inner" / "memory.max").write_text("max\n")
    assert measure_memory() == (64 * MIB, 40 * MIB)
    (groups / "outer" / "memory.max").unlink()
    assert measure_memory()[0] == psutil.virtual_memory().total
