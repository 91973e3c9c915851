"""What another user of the machine tries: the tests with a real second user, again and again."""

import os
import subprocess
import sys
from pathlib import Path

from torture.row import Row

_TESTS = Path(__file__).parent.parent / "tests" / "process" / "test_second_user.py"


def run(row: Row, _seed: int) -> None:
    """Run the attacks until the time is over."""
    if os.geteuid() != 0:
        row.figures["skipped"] = "needs root, to take another user's id"
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_TESTS)]
    while row.has_time:
        ended = subprocess.run(command, cwd=_TESTS.parents[2], capture_output=True, text=True, check=False)
        row.note("" if ended.returncode == 0 else ended.stdout[-600:])
        row.figures["attacks"] = ended.stdout.strip().splitlines()[-1]
