"""What every test relies on."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# What imports and the collection make stays, about a million objects: looking for garbage there takes half of the time.
gc.disable()

# A shell's background job begins with SIGINT and SIGQUIT ignored, one under nohup with SIGHUP too, and hands that on to
# whatever it starts. Tests of Ctrl-C and of a closed terminal are about processes that were started from a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

_FOLDERS = Path(__file__).parent
_OF_PROCESSES = ("process", "conformance", "mistakes", "pages")
_MARKS = {"unit": "unit", "gpu": "gpu", **dict.fromkeys(_OF_PROCESSES, "process")}
"""The mark of all tests of a folder; those beside the folders are unit tests."""
_PROCESS_SECONDS = 180
"""When a test of processes has hung, also on a slow and busy machine. What waits within one gives up before, and says
for what it has waited."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile shm.c where the library is of another source, as after a change of it or of the branch."""
    if not hasattr(config, "workerinput"):  # in the process that hands the tests out
        subprocess.run([sys.executable, _FOLDERS.parent / "hatch_build.py"], check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test by its folder, before `-m` chooses; "root" and "slurm" are marked where they are needed."""
    for item in items:
        folder, *_ = item.path.relative_to(_FOLDERS).parts
        item.add_marker(_MARKS.get(folder, "unit"))
        if _MARKS.get(folder) == "process" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_PROCESS_SECONDS))
        if folder == "conformance":
            item.add_marker("conformance")


def pytest_collection_finish() -> None:
    """Make this process cheap for small tensors and many objects, before the first test runs."""
    import torch  # not in the process that hands the tests out

    # Each thread that computes, as ranks that are threads do, would have helpers of its own, which wait in a loop.
    torch.set_num_threads(1)
    # What was imported, about a million objects, has no part in the garbage collections of the tests.
    gc.collect()
    gc.freeze()
    gc.enable()
