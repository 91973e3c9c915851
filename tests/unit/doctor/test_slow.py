"""What bounds a step, and who is behind, from recordings whose times are known."""

import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.recording.headers import header

from lockstep.doctor.report import slow_to_json
from lockstep.doctor.slow import find_slow, recorded_usage
from lockstep.doctor.slow_causes import UsageSample, cores_used_together, explain_slowness
from lockstep.doctor.system import UsageEvents, read_usage
from lockstep.recording import LAUNCHER, WorkerRecorder, open_recorder
from lockstep.recording.file_format import EventKind, StepPhase
from lockstep.recording.reading import EVENT_TYPE, FileEvents, read_file

IDLE, PREPARE, COMPUTE, REDUCE, AGREE, COMMIT, _CLOSED = StepPhase


def recorded(rank: int, parts: Mapping[str, int], other: Mapping[str, int], num_steps: int = 20) -> FileEvents:
    """Return the file of one of two ranks whose steps have parts of these lengths, and wait for each other."""
    rows: list[tuple[int, int, int, int, int, int, int, int]] = []
    numbers = itertools.count()

    def add(kind: EventKind, begin: int, end: int, index: int = 0) -> None:
        rows.append((next(numbers), begin, end, kind, 0, 0, index, 0))

    before = {each: sum(length for name, length in each_parts.items() if name in {"load", "work"})
              for each, each_parts in ((0, parts), (1, other))}  # fmt: skip
    arrives = max(before.values())
    step_length = arrives + parts["send"] + max(parts["update"] + parts["own"], other["update"] + other["own"])
    for step in range(num_steps):
        now = step * step_length
        add(EventKind.LOADING, now, now + parts["load"])
        now += parts["load"]
        add(EventKind.PHASE, now, now, PREPARE)
        add(EventKind.PHASE, now, now, COMPUTE)
        end = step * step_length + arrives + parts["send"] + parts.get("wakes", 0)
        add(EventKind.SHARD, now, end)
        now += parts["work"]
        add(EventKind.REDUCING, now, end)
        add(EventKind.COLLECTIVE, now, end, step)
        for phase in (REDUCE, AGREE, COMMIT):
            add(EventKind.PHASE, end, end, phase)
        add(EventKind.PHASE, end + parts["update"], end + parts["update"], IDLE)
    return FileEvents(
        path=Path(f"worker-{rank}.rec"),
        header=header(rank=rank, boot="a"),
        table=np.array(rows, EVENT_TYPE),
        texts=b"",
    )


EVEN = {"load": 10, "work": 10, "send": 10, "update": 10, "own": 10}


@pytest.mark.parametrize(
    ("part", "bound"),
    [
        ("load", "loading"),
        ("work", "forward and backward"),
        ("send", "communication"),
        ("update", "update"),
        ("own", "own code"),
    ],
)
def test_the_longest_part_bounds_the_step(part: str, bound: str) -> None:
    parts = {**EVEN, part: 100}
    found = find_slow([recorded(0, parts, parts), recorded(1, parts, parts)])
    assert (found.bound, found.behind) == (bound, None)
    assert found.text.startswith(f"{bound[0].upper()}{bound[1:]} bounds the step: 71% of the time of rank 0.")
    for use in found.workers:
        assert sum(use.shares.values()) == pytest.approx(1)


def test_two_parts_that_take_nearly_as_long_are_both_named() -> None:
    parts = {**EVEN, "work": 100, "send": 90}
    text = find_slow([recorded(0, parts, parts), recorded(1, parts, parts)]).text
    assert text.startswith("Forward and backward bounds the step: 45% of the time of rank 0.")
    assert " Communication takes nearly as much: 41%." in text
    assert "Fewer bytes" in text


@pytest.mark.parametrize(("part", "bound"), [("load", "loading"), ("work", "forward and backward")])
def test_the_rank_for_which_others_wait_is_named_with_what_it_does(part: str, bound: str) -> None:
    slow = {**EVEN, part: 100}
    found = find_slow([recorded(0, EVEN, slow), recorded(1, slow, EVEN)])
    assert (found.bound, found.behind) == (bound, 1)
    assert f"{bound[0].upper()}{bound[1:]} of rank 1 bounds the step" in found.text
    assert "The others wait for rank 1 for 64% of their time; it comes last in 100% of these waits." in found.text


def test_more_work_is_named_and_not_the_communication_that_only_its_rank_sees() -> None:
    # The last one to come waits for nobody, so all that it spends in collectives is communication. For the others the
    # same time is mostly waiting. It was named as the slow part because its ratio, 5 to 1, was the largest.
    quick, slow = {**EVEN, "work": 20, "send": 2}, {**EVEN, "work": 60, "send": 2, "wakes": 8}
    files = [recorded(0, quick, slow), recorded(1, slow, quick)]
    for file, size in zip(files, (16, 48), strict=True):
        file.table["size"][file.table["kind"] == EventKind.SHARD] = size
    found = find_slow(files)
    assert (found.bound, found.behind) == ("forward and backward", 1)
    assert "Its forward and backward takes 3.0 times as long as that of the others." in found.text
    assert "It has more work: 1.0 shards with 48 samples in a step, the others 16 samples." in found.text


def test_shards_that_are_no_multiple_of_the_workers_are_named_as_the_cause() -> None:
    # With 3 workers and 4 shards it advised to look for other processes on the cores of the one with two.
    quick, slow = {**EVEN, "work": 20}, {**EVEN, "work": 60}
    files = [recorded(0, quick, slow), recorded(1, slow, quick)]
    for file, kinds in zip(files, ([EventKind.SHARD], [EventKind.SHARD, EventKind.LOADING]), strict=True):
        is_shard = np.isin(file.table["kind"], [int(kind) for kind in kinds])
        file.table["kind"][is_shard], file.table["size"][is_shard] = EventKind.SHARD, 16
    text = find_slow(files).text
    assert "It has more work: 2.0 shards with 32 samples" in text
    assert "3 shards on 2 workers are unequal: make num_shards a multiple of the workers" in text
    assert "other processes" not in text


def test_a_save_after_the_last_step_counts_in_none() -> None:
    # It was divided by the time of the steps before it: saving took 1,200% of the time, and bounded the step.
    file = recorded(0, EVEN, EVEN)
    save = np.array([(1000, 2000, 12_000, EventKind.SAVING, 0, 0, 0, 0)], EVENT_TYPE)
    with_save = replace(file, table=np.concatenate([file.table, save]))
    assert find_slow([with_save]).text == find_slow([file]).text


def test_few_steps_say_nothing() -> None:
    found = find_slow([recorded(0, EVEN, EVEN, num_steps=2)])
    assert (found.bound, found.behind, found.workers) == ("", None, ())


def test_what_the_system_says_of_the_slow_rank_is_in_the_report() -> None:
    slow = {**EVEN, "work": 100}
    files = [recorded(0, EVEN, slow), recorded(1, slow, EVEN)]
    usage = [UsageSample(0, {"throttled_ns": 0}), UsageSample(10**9, {"throttled_ns": 6 * 10**8})]
    found = find_slow(files, {files[1].header.pid: usage})
    assert "Rank 1: its control group was throttled for 60% of the time" in found.text
    values = json.loads(slow_to_json(found))
    assert (values["bound"], values["behind"]) == ("forward and backward", 1)
    assert values["workers"][1]["shares"].keys() == found.workers[1].shares.keys()


def test_one_long_wait_counts_more_than_many_short_ones() -> None:
    # A worker that is stopped now and then is waited for seldom, and long.
    def with_calls(rank: int, begins: list[int]) -> FileEvents:
        file = recorded(rank, EVEN, EVEN)
        rows = [
            (1000 + n, begin, max(500, begin) + n * 50 + 1, EventKind.COLLECTIVE, 0, 0, 100 + n, 0)
            for n, begin in enumerate(begins)
        ]
        file.table["index"][file.table["kind"] == EventKind.COLLECTIVE] += 10_000 + 1000 * rank  # not in common
        table = np.concatenate([file.table, np.array(rows, EVENT_TYPE)])
        return FileEvents(path=file.path, header=file.header, table=table, texts=b"")

    found = find_slow([with_calls(0, [101, 202, 303, 310]), with_calls(1, [100, 201, 302, 700])])
    assert found.workers[1].came_last > 0.9  # of four calls it was the last in one


# -- Why a worker is slow, from what it has used -----------------------------------------------------------------------


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
