"""Leaving out the last collection of garbage: what must happen at the end of a process all the same."""

import subprocess
import sys
from pathlib import Path

from lockstep.processes import quick_exit

SCRIPT = """
import atexit, io, runpy, sys

class Log:
    def __init__(self, path):
        self.me, self.file = self, open(path, "w")

    def __del__(self):
        print("collected")

runpy.run_path(sys.argv[1])["exit_quickly"]()
sys.stdout = io.TextIOWrapper(sys.stdout.detach())  # the old one cannot even say whether it is closed
log = Log(sys.argv[2])
log.file.write("the last line")
atexit.register(print, "handler")
del log
"""


def test_files_in_reference_cycles_are_written_and_nothing_is_collected(tmp_path: Path) -> None:
    # Torch leaves half a million objects, at which the interpreter looks several times: half a second for each end.
    log = tmp_path / "log"
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, quick_exit.__file__, str(log)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("handler\n", "")
    assert log.read_text() == "the last line"
