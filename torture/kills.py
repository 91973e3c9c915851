"""Workers of ls.launch and of lockstep train that are killed: the campaigns of benchmarks/, with fresh seeds."""

import re
import subprocess
import sys
import time
from pathlib import Path

from torture.row import Row

_BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
_FOUND = re.compile(r"(\d+) of (\d+)(?: runs equal the undisturbed one;)? \(?(\d+) kills")
"""What both campaigns print: of how many runs how many were right, and how many workers were killed."""
_SECONDS = 900
_LEAST_MINUTES = 0.5
_ELASTIC_RUNS = 4
"""So many single runs with both backends, then some minutes of whole trainings."""


def run(row: Row, seed: int) -> None:
    """Run both campaigns in turn."""
    kills = number = 0
    while row.has_time:
        turn, place = divmod(number, _ELASTIC_RUNS + 1)
        if place < _ELASTIC_RUNS:
            backend = ("shm", "gloo")[place % 2]
            command = ["elastic.py", "--seed", str(seed), "--only", str(number), "--backends", backend]
        else:
            minutes = max((row.until - time.monotonic()) / 60, _LEAST_MINUTES)
            command = ["killing.py", "--seed", str(seed + turn), "--runs", "6", "--minutes", f"{min(minutes, 5):.1f}"]
        num_right, num_tried, num_kills, said = _run(command)
        kills += num_kills
        for index in range(max(num_tried, 1)):
            is_wrong = index == 0 and (num_right < num_tried or num_tried == 0)
            row.note(f"{' '.join(command)}: {said[-600:]}" if is_wrong else "")
        number += 1
        row.figures["kills"] = str(kills)


def _run(command: list[str]) -> tuple[int, int, int, str]:
    """Return how many runs were right, how many there were, how many workers were killed, and what was printed."""
    whole = [sys.executable, str(_BENCHMARKS / command[0]), *command[1:]]
    try:
        ended = subprocess.run(whole, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return 0, 0, 0, str(error)
    found = _FOUND.search(ended.stdout)
    if found is None:
        return 0, 0, 0, ended.stdout + ended.stderr
    num_right, num_tried, num_kills = map(int, found.groups())
    return num_right, num_tried, num_kills, ended.stdout
