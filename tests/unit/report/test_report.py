import dataclasses
import io
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.unit.report.events import STARTED, step

from lockstep.doctor.slow import SlowReport, TimeUse
from lockstep.errors import RunDirectoryError
from lockstep.events import CheckpointSaved, EpochFinished, Event, RecordingTakenOver
from lockstep.recording import WorkerRecorder
from lockstep.report import progress
from lockstep.report.metrics_file import MetricsFile, read_metrics
from lockstep.report.progress import PlainLines, ProgressBar, Speed, fold


def epoch(number: int, **test: float) -> EpochFinished:
    return EpochFinished(
        epoch=number,
        global_step=2 * number + 2,
        train_loss=0.5,
        measured={f"test_{name}": value for name, value in test.items()},
        samples_per_second=1000.0,
        learning_rate=0.1,
    )


EVENTS: list[Event] = [
    STARTED,
    step(1),
    step(2),
    epoch(0, loss=0.7, accuracy=0.5),
    CheckpointSaved(path=Path("step-00000002.ckpt"), global_step=2),
    step(3),
    step(4),
    epoch(1, loss=0.6, accuracy=0.75),
]


def test_metrics_file_reads_back(tmp_path: Path) -> None:
    recorder = MetricsFile(tmp_path / "metrics.jsonl")
    for event in EVENTS:
        recorder.record(event)
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [row["kind"] for row in rows] == ["step", "step", "epoch", "step", "step", "epoch"]
    assert rows[-1]["test_accuracy"] == 0.75


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for number in (1, 2, 3):
        first.record(step(number))
    resumed = MetricsFile(path)
    resumed.rewind(2)
    resumed.record(step(3, loss=0.1))
    assert [(row["global_step"], row["loss"]) for row in read_metrics(path)] == [(1, 0.5), (2, 0.5), (3, 0.1)]
    MetricsFile(tmp_path / "none.jsonl").rewind(2)


def test_a_full_disk_at_a_resume_is_explained_and_loses_nothing(tmp_path: Path) -> None:
    # It was a traceback, and an empty file beside.
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2, 3):
        MetricsFile(path).record(step(number))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot be written: .* continue the run with --resume"):
            MetricsFile(path).rewind(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(read_metrics(path))) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_step_without_a_loss_is_a_line(tmp_path: Path) -> None:
    # A step that was skipped has none, and JSON has no word for that: the run ended there.
    path = tmp_path / "metrics.jsonl"
    recorder = MetricsFile(path)
    for event in (step(1, loss=float("nan")), step(2), epoch(0, loss=float("nan")), step(3, loss=float("inf"))):
        recorder.record(event)
    assert "NaN" not in path.read_text()
    assert [row.get("loss") for row in read_metrics(path)] == [None, 0.5, None, None]


def test_a_line_cut_off_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.record(step(1))
    with path.open("a") as file:
        file.write('{"kind": "st')
    resumed = MetricsFile(path)
    resumed.record(step(2, loss=0.1))
    resumed.record(step(3, loss=0.2))
    assert [row["loss"] for row in read_metrics(path)] == [0.5, 0.1, 0.2]


def test_plain_lines_say_one_line_per_epoch() -> None:
    stream = io.StringIO()
    lines = PlainLines(Console(file=stream, force_terminal=False))
    for event in EVENTS:
        lines.record(event)
    told = stream.getvalue().splitlines()
    assert len(told) == 3
    assert "1,234 parameters" in told[0]
    assert "2 workers on the CPU" in told[0]
    assert told[2] == "epoch 2/2  loss 0.5000  test loss 0.6000  test accuracy 75.00%  1,000 samples/s"


def test_long_lines_are_folded_on_a_terminal_alone() -> None:
    parts = ["epoch 1/2", "loss 0.5", "test loss 0.6", "100 samples/s"]
    assert fold(parts, None) == ["epoch 1/2  loss 0.5  test loss 0.6  100 samples/s"]
    assert fold(parts, 40) == ["epoch 1/2  loss 0.5  test loss 0.6", "           100 samples/s"]
    assert fold(parts, 5) == ["epoch 1/2  loss 0.5", "           test loss 0.6", "           100 samples/s"]


def test_a_run_without_a_test_set_says_so() -> None:
    def told(num_test_samples: int) -> str:
        stream = io.StringIO()
        lines = PlainLines(Console(file=stream, force_terminal=False))
        lines.record(dataclasses.replace(STARTED, num_test_samples=num_test_samples))
        return stream.getvalue()

    assert "no accuracy is measured" in told(0)
    assert "no accuracy is measured" not in told(1)


def test_progress_bar_shows_steps_on_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressBar(Console(file=stream, force_terminal=True, width=100)) as bar:
        for event in EVENTS:
            bar.record(event)
    told = stream.getvalue()
    assert "step 4/4" in told
    assert "test accuracy 75.00%" in told


def test_the_bar_of_a_run_that_goes_on_begins_within_its_epoch() -> None:
    continued = dataclasses.replace(STARTED, first_epoch=1, first_step=1)
    for event in (continued, RecordingTakenOver(run=STARTED, global_step=3)):
        stream = io.StringIO()
        with ProgressBar(Console(file=stream, force_terminal=True, width=100)) as bar:
            bar.record(event)
        assert "epoch 2 step 3/4" in stream.getvalue()


def test_a_file_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        MetricsFile(tmp_path / "gone" / "m.jsonl").record(step(1))


def test_lines_that_may_fail_are_warned_of_once_and_come_again_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "metrics.jsonl"
    recorder = MetricsFile(path, may_fail=True)
    with pytest.warns(UserWarning, match="The training continues"):
        recorder.record(step(1))
    recorder.record(step(2))  # a second warning would be an error here
    path.parent.mkdir()
    recorder.record(step(3))
    assert [row["global_step"] for row in read_metrics(path)] == [3]


def test_the_speed_says_what_is_left_of_epoch_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(WorkerRecorder, "seconds", lambda: next(times))
    speed = Speed()
    speed.begin(STARTED, 0)  # 2 epochs of 2 steps, 500 samples each
    assert speed.after(1) == "125 samples/s  left: epoch 0:02, run 0:06"
    assert speed.after(2) == "125 samples/s  left: epoch 0:00, run 0:04"


@pytest.mark.parametrize(
    ("shares", "behind", "text"),
    [
        ({"loading": 0.61, "forward and backward": 0.3}, None, "61% loading"),
        ({"waiting": 0.45, "forward and backward": 0.5}, 1, "45% waiting for rank 1"),
        ({"communication": 0.2, "forward and backward": 0.7}, None, ""),
    ],
)
def test_the_bar_says_what_takes_long_beside_computing(
    shares: dict[str, float], behind: int | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = TimeUse(rank=0, num_steps=9, seconds=1.0, shares=shares, came_last=0.0)
    looks: list[object] = []

    def look(files: object) -> SlowReport:
        looks.append(files)
        return SlowReport(text="", bound="", behind=behind, workers=(use,))

    monkeypatch.setattr(progress, "find_slow", look)
    monkeypatch.setattr(progress, "own_recorder", lambda: SimpleNamespace(directory=tmp_path))
    now = 0.0
    monkeypatch.setattr(WorkerRecorder, "seconds", lambda: now)
    bound = progress.Bound()
    assert (bound.text(), looks) == ("", [])
    now = 6.0
    assert bound.text() == text
    now = 7.0
    assert (bound.text(), len(looks)) == (text, 1), "the recording is not read at each step"
