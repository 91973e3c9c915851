"""Recording by one process after the other: no row is missing, none is there twice."""

from pathlib import Path
from typing import final

import pytest
from tests.unit.report.events import STARTED, step

from lockstep.events import (
    EpochFinished,
    Event,
    RecordingTakenOver,
    WorkerEnded,
    WorkersChanged,
)
from lockstep.report.metrics_file import MetricsFile, Succession, read_metrics, sum_epoch


def epoch(global_step: int) -> EpochFinished:
    return EpochFinished(
        epoch=0, global_step=global_step, train_loss=1.0, measured={}, samples_per_second=1.0, learning_rate=0.1
    )


def lost(generation: int, global_step: int) -> WorkersChanged:
    return WorkersChanged(
        generation=generation,
        lost=(WorkerEnded(rank=0, pid=7, reason="killed by SIGKILL"),),
        epoch=0,
        step=global_step,
        global_step=global_step,
        repeats_step=True,
        seconds=0.1,
        shards=(range(2),),
        text="rank 0 was lost",
    )


@final
class Worker:
    """A worker that records, or would."""

    def __init__(self, path: Path, *, is_first: bool) -> None:
        self.is_first = is_first
        self.shown: list[Event] = []
        self.recorder = Succession(lambda: self.is_first, MetricsFile(path), lambda: self)

    def record(self, event: Event) -> None:
        self.shown.append(event)


def written(path: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["global_step"]) for row in read_metrics(path)]


@pytest.mark.parametrize("num_written", [2, 3, 4, 5])
@pytest.mark.parametrize("half", ["", '{"kind": "st', '{"kind": "step", "global_step": 9}'])
def test_the_next_one_writes_what_is_missing_and_nothing_twice(tmp_path: Path, num_written: int, half: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = Worker(path, is_first=True), Worker(path, is_first=False)
    events: list[Event] = [STARTED, step(1), step(2), step(3), epoch(3)]
    for event in events[:num_written]:  # the second one knows the first three; the first one may be ahead of it
        first.recorder.record(event)
    for event in events[:3]:
        second.recorder.record(event)
    with path.open("a") as file:
        file.write(half)
    second.is_first = True
    seen_later: list[Event] = [lost(1, 2), step(3), epoch(3), step(4)]
    for event in seen_later:
        second.recorder.record(event)
    found = written(path)
    assert sorted(found) == sorted([*(("step", number) for number in (1, 2, 3, 4)), ("epoch", 3), ("workers", 2)])
    assert sum_epoch(path, 0)[1] == sum_epoch(path, 1)[1] == 4
    assert second.shown[0] == RecordingTakenOver(run=STARTED, global_step=2)
    assert second.shown.count(step(4)) == 1
    assert STARTED not in second.shown


def test_a_worker_that_never_writes_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    worker = Worker(path, is_first=False)
    for number in range(1, 100):
        worker.recorder.record(step(number))
    assert not path.exists()
    assert worker.shown == []


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.atomic_write._TAIL_BYTES", 300)
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for number in range(1, 21):
        first.record(step(number))
    with path.open("a") as file:
        file.write('{"kind"')
    assert ("step", 20) in (keys := MetricsFile(path).take_over())
    assert len(keys) < 4
    assert written(path) == [("step", number) for number in range(1, 21)]
