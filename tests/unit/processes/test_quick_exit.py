"""Leaving out what the end of a process takes: what must happen all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, ctypes, io, sys, types
from lockstep.processes.ending import exit_quickly

class Log:
    def __init__(self, path):
        self.me, self.file = self, open(path, "w")

    def __del__(self):
        print("collected")

library = ctypes.CDLL(None)

def call_at_native_end(text):
    library.__cxa_atexit(ctypes.cast(library.puts, ctypes.c_void_p), ctypes.c_char_p(text), None)

earlier, later = b"loaded before", b"loaded after"
if sys.argv[2]:
    sys.modules[sys.argv[2]] = types.ModuleType(sys.argv[2])
    sys.modules[sys.argv[2]].__file__ = "somewhere.so"
call_at_native_end(earlier)
exit_quickly()
call_at_native_end(later)
sys.stdout = io.TextIOWrapper(sys.stdout.detach())  # the old one cannot even say whether it is closed
log = Log(sys.argv[1])
log.file.write("the last line")
atexit.register(print, "handler")
del log
sys.exit(3)
"""


def end(log: Path, other: str = "", **variables: str) -> list[str]:
    """Return what a process writes while it ends."""
    command = [sys.executable, "-c", SCRIPT, str(log), other]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    assert (found.returncode, found.stderr) == (3, "")
    assert log.read_text() == "the last line"
    return found.stdout.splitlines()


def test_files_in_reference_cycles_are_written_and_nothing_is_collected(tmp_path: Path) -> None:
    # Torch leaves half a million objects, at which the interpreter looks several times: half a second for each end.
    # Its libraries then took 0.13 s more. Handlers of what is loaded later run, and what they print is written.
    assert end(tmp_path / "log") == ["handler", "loaded after"]


@pytest.mark.parametrize(("other", "variables"), [("h5py.defs", {}), ("", {"CUDA_INJECTION64_PATH": "libprofiler.so"})])
def test_other_native_code_may_save_at_its_end(tmp_path: Path, other: str, variables: dict[str, str]) -> None:
    assert end(tmp_path / "log", other, **variables) == ["handler", "loaded after", "loaded before"]


# -- A process ends with its own exit code although a thread of it comes back from native code meanwhile ---------------


IN_NATIVE_CODE = """
import sys, time
import torch
from lockstep.processes.ending import start_thread_left_alone

def compute():
    tensor = torch.ones(300_000)
    while True:
        tensor.add_(1)  # leaves the interpreter, and comes back, again and again

start_thread_left_alone(compute, name="computes")
sys.exit(3)
"""


def test_a_thread_in_native_code_does_not_abort_the_process() -> None:
    # "terminate called without an active exception", and exit code -6: seen when a rank was lost while Gloo connected.
    ended = subprocess.run(
        [sys.executable, "-c", IN_NATIVE_CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")
