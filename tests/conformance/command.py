"""A run of one of this folder's commands, in a process of its own.

Torch's test modules read the environment and set warnings when they are imported: pytest's process is no place for
that.
"""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str], log: Path) -> None:
    """Run a command from the repository's root; nothing that it started outlives this call."""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(timeout=55)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after 55 s\n{log.read_text()}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
