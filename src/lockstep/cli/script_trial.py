"""A script, run for a few steps on two workers: what Lockstep says of it then."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.recording.file_format import EventKind
from lockstep.recording.reading import FileEvents, read_recording
from lockstep.settings import read_settings

_MOST_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.2
_END_SECONDS: Final = 10.0
_RANK: Final = re.compile(r"^(\[rank \d+\] |\[rank\d+\]:? ?)*")
_SAID: Final = re.compile(r"(Warning|Error): |^The job stands still|^error: ")


@dataclass(frozen=True, slots=True)
class Trial:
    said: tuple[str, ...]
    """Its warnings and errors, each once."""
    num_steps: int
    """So many steps, or backwards of a wrapper, had the slowest worker begun."""
    exit_code: int | None
    """With what it ended by itself; None if it did not."""


def try_script(path: Path, steps: int, start: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen) -> Trial:
    """Run a script on two CPU workers until they have begun so many steps, or for two minutes (local).

    Torch's wrapper and samplers in it are replaced by ours, as with `lockstep run --drop-in`.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "lockstep", "run", "--drop-in", "--devices", "cpu:2", str(path)]
        job = start(
            command,
            env=read_settings().for_worker({"TMPDIR": folder, "LOCKSTEP_RECORDING": "on"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            is_enough, num_steps = False, 0
            pause = threading.Event()
            for _ in range(round(_MOST_SECONDS / _LOOK_SECONDS)):
                has_ended = job.poll() is not None
                num_steps = max(num_steps, _count_steps(Path(folder)))
                is_enough = num_steps >= steps
                if has_ended or is_enough:
                    break
                pause.wait(_LOOK_SECONDS)
            code = job.poll()
        finally:
            _end(job)
        output.seek(0)
        said = _said(output.read().decode(errors="replace"))
    return Trial(tuple(dict.fromkeys(said)), num_steps, code)


def _end(job: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, number)
        try:
            job.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _count_steps(folder: Path) -> int:
    files = [file for each in folder.glob("lockstep-*/*") for file in read_recording(each)]
    return min((_steps_of(file) for file in files if file.header.worker >= 0), default=0)


def _steps_of(file: FileEvents) -> int:
    kinds = file.table["kind"]
    prepared = (kinds == EventKind.PHASE) & (file.table["index"] == 2)  # noqa: PLR2004 - PREPARE
    return max(int(prepared.sum()), int((kinds == EventKind.BACKWARD).sum()))


def _said(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = _RANK.sub("", line)
        if _SAID.search(words):
            yield words
