"""Other processes on the machine."""

import os
import subprocess
import sys
import time

from lockstep.doctor.system import (
    Neighbour,
    ProcessTimes,
    describe_neighbours,
    find_neighbours,
    read_process_times,
)


def test_a_busy_process_is_found_with_its_user_and_those_of_the_job_are_not() -> None:
    spinning = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(spinning, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            before = read_process_times()
            while (after := read_process_times())[busy.pid].cpu_seconds - before[busy.pid].cpu_seconds < 0.05:
                time.sleep(0.05)
        finally:
            busy.kill()
            found = find_neighbours(before, after, 0.01, job=[])
            of_job = find_neighbours(before, after, 0.01, job=[os.getpid()])  # which has started it
    [neighbour] = [each for each in found if each.pid == busy.pid]
    assert neighbour.cores > 1
    assert neighbour.program.startswith("python")
    assert neighbour.user
    assert busy.pid not in [each.pid for each in of_job]


def test_what_began_or_idles_between_two_looks_is_none_of_them() -> None:
    before = {1: ProcessTimes(0, 0), 2: ProcessTimes(1, 100)}
    after = {1: ProcessTimes(0, 0), 2: ProcessTimes(1, 100), 3: ProcessTimes(1, 1)}
    assert find_neighbours(before, after, 1.0, job=[]) == []


def test_little_is_not_mentioned_and_much_names_the_busiest() -> None:
    def neighbours(*cores: float) -> list[Neighbour]:
        return [Neighbour(pid=7 + n, user="ana", program="solver", cores=each) for n, each in enumerate(cores)]

    assert describe_neighbours(neighbours(0.2, 0.1), 8) == ""
    assert describe_neighbours(neighbours(2.0, 0.5), 8) == (
        "Other processes on this machine use 2.5 of its 8 cores: solver (process 7 of ana) 2.0, solver (process 8 of "
        "ana) 0.5."
    )
    assert describe_neighbours(neighbours(2, 1, 1, 1), 8).endswith("solver (process 9 of ana) 1.0, and 1 more.")
