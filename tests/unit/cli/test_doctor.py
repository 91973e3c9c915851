"""What the doctor's command adds to the doctor: GPUs."""

import io
import os
from pathlib import Path

import pynvml
import pytest
from rich.console import Console
from tests.unit.devices.machines import GIB, Card, FakeNvml, refusal

from lockstep.cli import doctor
from lockstep.cli.doctor import gpu_use
from lockstep.doctor.activity import Activity
from lockstep.doctor.diagnosis import Verdict, WorkerState
from lockstep.doctor.examination import Examination
from lockstep.doctor.report import print_examination


def test_memory_and_load_of_the_workers_gpus_are_shown_and_who_else_is_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pid, other = os.getpid(), os.getppid()
    cards = (
        Card(load=97, computing={pid: 3 * GIB, other: GIB}),
        Card(load=50, computing={other: GIB}),  # no worker is on it
    )
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(*cards))
    found = gpu_use([pid])
    assert found[pid] == "3,072 MiB on GPU 0, busy 97 %"
    assert found[other].startswith("1,024 MiB on GPU 0, busy 97 %")
    assert "GPU 1" not in found[other]
    worker = WorkerState(rank=0, pid=pid, activity=Activity(doing="has ended", since_ns=0), seconds=0.0, facts=None)
    verdict = Verdict(kind="running", text="All is well.")
    console = Console(width=250, record=True, file=io.StringIO())
    examination = Examination(recording=Path("r"), program="", workers=(worker,), stacks={}, verdict=verdict)
    print_examination(examination, console, with_stacks=False, gpus=found)
    text = console.export_text()
    assert "3,072 MiB on GPU 0, busy 97 %" in text
    assert f"Other processes on its GPUs: process {other}: 1,024 MiB on GPU 0" in text


def test_without_a_driver_or_workers_there_is_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(broken=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert gpu_use([os.getpid()]) == {}
    monkeypatch.setattr(doctor, "pynvml", FakeNvml(Card(computing={1: GIB})))
    assert gpu_use([]) == {}
