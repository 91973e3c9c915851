"""Why a worker is slow, from what it has used."""

import os
import time
from pathlib import Path

import pytest

from lockstep.doctor.slow import recorded_usage
from lockstep.doctor.slow_causes import UsageSample, cores_used_together, explain_slowness
from lockstep.doctor.system import UsageEvents, read_usage
from lockstep.recording import LAUNCHER, WorkerRecorder, open_recorder
from lockstep.recording.reading import read_file

SECOND = 10**9


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ({"throttled_ns": 0}, {"throttled_ns": 5 * SECOND}, "throttled for 50% of the time"),
        ({"is_stopped": 1}, {"is_stopped": 0}, "stopped in 50% of the looks"),
        (
            {"core_wait_ns": 0, "num_running": 8, "num_cores": 2},
            {"core_wait_ns": 30 * SECOND, "num_running": 8, "num_cores": 2},
            "its 8 busy threads share 2 cores: they waited 3.0 s for a core in each second",
        ),
        (
            {"core_wait_ns": 0, "num_running": 1, "num_cores": 2, "cpu_ns": 0, "forced_switches": 0},
            {"core_wait_ns": 6 * SECOND, "num_running": 1, "num_cores": 2, "cpu_ns": 4 * SECOND, "forced_switches": 90},
            "in each second it waited 0.60 s for a core, used 0.40 s, and was interrupted 9 times",
        ),
        ({"read_bytes": 0}, {"disk_wait_ns": 5 * SECOND, "read_bytes": 10**9}, "50% of the time, at 100.0 MB/s"),
        ({}, {"swapped_bytes": 2**30}, "1.00 GiB of its memory are swapped out"),
        ({"major_faults": 0}, {"major_faults": 1000}, "100 pages of its memory from disk each second"),
    ],
)  # fmt: skip
def test_each_cause_has_its_number(first: dict[str, int], last: dict[str, int], said: str) -> None:
    samples = [UsageSample(0, first), UsageSample(10 * SECOND, last)]
    [text] = explain_slowness(samples, 0.0)
    assert said in text


def test_a_healthy_worker_has_no_cause() -> None:
    usage = {"core_wait_ns": 0, "throttled_ns": 0, "num_running": 1, "num_cores": 2, "cpu_ns": 0}
    samples = [UsageSample(0, usage), UsageSample(SECOND, usage | {"cpu_ns": SECOND, "core_wait_ns": SECOND // 100})]
    assert explain_slowness(samples, 2.0) == []
    assert explain_slowness(samples[:1], 2.0) == []


@pytest.mark.parametrize(
    ("own", "others", "cores", "said"),
    [
        (0.8, [(0.8, 2)], 2, "the workers of this job use 1.6 of 2 cores"),  # the threads of Gloo and of torch
        (0.8, [(0.3, 2)], 2, "another process was on its core"),
        (0.8, [], 1, "another process was on its core"),
        (0.3, [(0.9, 2)], 1, "another process was on its core"),  # that worker is on other cores
    ],
)
def test_workers_of_the_job_are_no_other_processes(
    own: float, others: list[tuple[float, int]], cores: int, said: str
) -> None:
    def samples_of(used: float, cores: int) -> list[UsageSample]:
        first = {"cpu_ns": 0, "core_wait_ns": 0, "num_running": 1, "num_cores": cores}
        later = first | {"cpu_ns": int(used * SECOND), "core_wait_ns": int(0.3 * SECOND)}
        return [UsageSample(0, first), UsageSample(SECOND, later)]

    used_by_job = cores_used_together([samples_of(own, cores), *(samples_of(*each) for each in others)])
    [text] = explain_slowness(samples_of(own, cores), 3.0, 0.4, used_by_job)
    assert said in text


@pytest.mark.parametrize(
    ("computed", "in_collectives", "is_said"), [(0.1, 0.1, False), (0.1, 0.6, True), (0.6, 0.1, True)]
)
def test_a_worker_that_sleeps_by_itself_is_not_slow_because_of_its_core(
    computed: float, in_collectives: float, *, is_said: bool
) -> None:
    # A data set that sleeps, on a busy host: another process on the core was said to be the cause.
    usage = {"core_wait_ns": 0, "num_running": 1, "num_cores": 2, "cpu_ns": 0}
    later = usage | {"core_wait_ns": SECOND // 4, "cpu_ns": int(computed * SECOND)}
    found = explain_slowness([UsageSample(0, usage), UsageSample(SECOND, later)], 4.0, in_collectives)
    assert bool(found) == is_said


def test_what_a_process_uses_is_recorded_by_the_launcher(tmp_path: Path) -> None:
    launcher, worker = WorkerRecorder(), WorkerRecorder()
    open_recorder(launcher, tmp_path, worker=LAUNCHER, rank=LAUNCHER, world_size=1, capacity=256)
    open_recorder(worker, tmp_path, worker=0, rank=0, world_size=1, capacity=64)
    events = UsageEvents(launcher)
    events.look(tmp_path)
    events.look(tmp_path)  # too early for another one
    events._next = time.monotonic()
    events.look(tmp_path)
    assert events._pause == 2.0  # seconds longer after each look, however many workers there are
    [samples] = recorded_usage(read_file(tmp_path / "launcher.rec")).values()
    worker.close()
    launcher.close()
    assert len(samples) == 2
    assert samples[0].usage["memory_bytes"] > 2**20
    assert samples[1].usage["cpu_ns"] >= samples[0].usage["cpu_ns"]
    assert read_usage(os.getpid())["num_cores"] >= 1
