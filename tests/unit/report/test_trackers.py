"""Trackers follow metrics.jsonl: through resumes and a lost rank 0 they hold each row once."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import pytest
import torch
from tests.support.fitting import importable
from tests.unit.report.events import STARTED, step

from lockstep.cli.train import Job, train_worker
from lockstep.errors import ConfigError
from lockstep.events import EpochFinished, Event, Recorders
from lockstep.report.metrics_file import MetricsFile, Succession, read_metrics, sum_epoch
from lockstep.report.trackers import Following, TrackedRun, check_trackers, make_trackers
from lockstep.report.trackers.known import Ending
from lockstep.runs.config import parse_config
from lockstep.runs.saving import Resume

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

def data():
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    half = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return half, half

class Broken:
    def start(self, run):
        raise OSError("no such service")
    def log(self, global_step, values):
        pass
    def end(self, ending):
        pass

class FailsAt(ls.Callback):
    def on_step(self, trainer, result):
        if trainer.global_step == 5:
            raise OSError("killed here")
"""
VALUES: dict[str, Any] = {"model": "torch.nn:Linear", "model_args": {"in_features": 3, "out_features": 1}}
VALUES |= {"data": "tracked_case:data", "loss": "torch.nn.functional:mse_loss", "batch_size": 8, "num_shards": 2}
VALUES |= {"keep": 99, "epochs": 3, "async_save": False, "save_every": 2}
Logged = list[tuple[int, str, float]]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path) -> Any:
    with importable("tracked_case", MODULE, tmp_path):
        yield


@final
class Service:
    """What a tracker writes to; it outlives the processes."""

    def __init__(self) -> None:
        self.logged: Logged = []
        self.keys: set[str] = set()
        self.endings: list[Ending] = []


@final
class FakeTracker:
    """Loses what it has queued when it is not ended, as a killed process does."""

    def __init__(self, service: Service, *, queue: int = 3) -> None:
        self.service = service
        self.queue = queue
        self.queued: Logged = []

    def start(self, run: TrackedRun) -> int:
        self.service.keys.add(run.key)
        self.service.logged = [each for each in self.service.logged if each[0] < run.global_step]
        return max((step for step, _, _ in self.service.logged), default=0) - 1

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        known = {each[:2] for each in self.service.logged}
        self.queued += [(global_step, *each) for each in values.items() if (global_step, each[0]) not in known]
        if len(self.queued) > self.queue:
            self.flush()

    def flush(self) -> None:
        self.service.logged += self.queued
        self.queued = []

    def end(self, ending: Ending) -> None:
        self.flush()
        self.service.endings.append(ending)


def shown(path: Path) -> list[tuple[int, str]]:
    kept = {"loss", "learning_rate", "train_loss", "test_loss", "samples_per_second", "grad_norm"}
    rows = list(read_metrics(path))
    return sorted((row["global_step"], f"{row['kind']}/{name}") for row in rows for name in row if name in kept)


def names(service: Service) -> list[tuple[int, str]]:
    return sorted(each[:2] for each in service.logged)


def train(folder: Path, resume_at: int | None = None, **values: Any) -> Any:
    """Train as `lockstep train` does in its only worker; `_open` rewinds the file."""
    import lockstep as ls

    folder.mkdir(exist_ok=True)
    resume = None
    if resume_at is not None:
        path = folder / f"step-{resume_at:08d}.ckpt"
        MetricsFile(folder / "metrics.jsonl").rewind(resume_at)
        loss, weight = sum_epoch(folder / "metrics.jsonl", (resume_at + 1) // 3)
        resume = Resume(path=path, allowed=frozenset({"callbacks"}), epoch_loss=loss, epoch_weight=weight)
    job = Job(config=parse_config(VALUES | values, "config"), run_dir=folder, resume=resume, code=folder)
    return train_worker(ls.Run(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")), job)


def test_a_resumed_run_has_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    made = [FakeTracker(service) for _ in range(2)]
    takes = iter(made)
    monkeypatch.setattr("lockstep.cli.train.make_trackers", lambda named: [("fake", next(takes))])
    monkeypatch.setattr("lockstep.cli.train.handle_stop_signals", lambda *args, **named: None)
    folder = tmp_path / "run"
    with pytest.raises(Exception, match="killed here"):
        train(folder, callbacks=["tracked_case:FailsAt"])
    assert service.endings == ["failed"]
    train(folder, resume_at=4)
    assert names(service) == shown(folder / "metrics.jsonl")
    assert {number for number, name in names(service) if name == "step/loss"} == set(range(1, 10))
    assert {number for number, name in names(service) if name == "epoch/test_loss"} == {3, 6, 9}
    assert service.endings == ["failed", "finished"]
    assert len(service.keys) == 1


@pytest.mark.parametrize("num_written", [1, 2, 3, 4])
def test_the_next_rank_0_continues_without_a_gap(tmp_path: Path, num_written: int) -> None:
    service, path, first_rank = Service(), tmp_path / "metrics.jsonl", [0]

    def worker(rank: int) -> Succession:
        following = Following(lambda: [("fake", FakeTracker(service, queue=0))], path, {"api_key": "hidden"})
        return Succession(lambda: rank == first_rank[0], MetricsFile(path), lambda: Recorders([following]))

    first, second = worker(0), worker(1)
    events: list[Event] = [STARTED, step(1), step(2), step(3)]
    for event in events[:num_written]:
        first.record(event)
    for event in events[:2]:
        second.record(event)
    first_rank[0] = 1
    for event in (step(2), step(3), step(4)):
        second.record(event)
    assert names(service) == shown(path) == [(number, "step/loss") for number in (1, 2, 3, 4)]


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    class Failing(FakeTracker):  # type: ignore[misc]
        def flush(self) -> None:
            raise OSError("service unavailable")

    service, path = Service(), tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    with Following(lambda: [("own", Failing(service, queue=0)), ("fake", FakeTracker(service))], path, {}) as following:
        following.record(STARTED)
        metrics.record(step(1))
        with pytest.warns(UserWarning, match="tracker own is left out from here on: OSError: service unavailable"):
            following.record(step(1))
        following.record(step(2))
    assert names(service) == [(1, "step/loss"), (2, "step/loss")]


def test_mistakes_are_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs tensorboard and wandb.*pip install 'lockstep-ddp\[trackers\]'"):
        check_trackers(["tensorboard", {"wandb": {"mode": "offline"}}])
    with pytest.raises(ConfigError, match="unexpected keyword argument 'fodler'"):
        check_trackers([{"tensorboard": {"fodler": "here"}}])
    with pytest.raises(ConfigError, match="Module without start and log and end"):
        make_trackers([{"torch.nn:Module": {}}])
    with pytest.raises(ConfigError, match="trackers holds 'tensorbord', expected a list of tensorboard, wandb"):
        parse_config(VALUES | {"trackers": ["tensorbord"]}, "config")
    following = Following(lambda: make_trackers(["tracked_case:Broken"]), tmp_path / "metrics.jsonl", {})
    with pytest.raises(ConfigError, match="tracked_case:Broken cannot be started: OSError: no such service"):
        following.record(STARTED)


def test_tensorboard_files_hold_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    path = tmp_path / "metrics.jsonl"
    for last, begin in ((3, 1), (5, 3)):  # the second process resumes after step 2
        metrics = MetricsFile(path)
        metrics.rewind(begin - 1)
        with Following(lambda: make_trackers(["tensorboard"]), path, {"epochs": 2}) as following:
            for event in (STARTED, *map(step, range(begin, last + 1))):
                metrics.record(event)
                following.record(event)
            event = EpochFinished(
                epoch=0,
                global_step=last,
                train_loss=1,
                measured={"test_loss": 2},
                samples_per_second=1,
                learning_rate=0.1,
            )
            metrics.record(event)
            following.record(event)
    (file,) = (tmp_path / "tensorboard").iterdir()
    read = [
        (event.step, value.tag)
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
        if not value.tag.startswith("config")
    ]
    assert sorted(read) == shown(path)


def test_a_loop_of_ones_own_is_tracked_by_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep as ls
    from lockstep.report.trackers.callback import Track

    service = Service()
    monkeypatch.setattr("lockstep.report.trackers.callback.make_trackers", lambda named: [("f", FakeTracker(service))])
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ls.ShardedLoader(dataset, batch_size=8, num_shards=2, seed=0)

    def trainer() -> ls.Trainer:
        model = torch.nn.Linear(3, 1)
        made = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        track = Track([], tmp_path / "own", {"lr": 0.1})
        return ls.Trainer(model, made, loss=loss, num_shards=2, seed=0, callbacks=[track])

    first = trainer()
    for batch in loader.epoch(0):
        first.step(batch)
        if first.global_step == 2:
            first.save(tmp_path / "two.ckpt")
    second = trainer()
    second.load(tmp_path / "two.ckpt")
    for batch in loader.epoch(0, 2):
        second.step(batch)
    second.close()
    assert names(service) == shown(tmp_path / "own" / "metrics.jsonl")
    assert [number for number, _ in names(service)] == [1, 2, 3]
    third = trainer()
    with pytest.raises(ls.RunDirectoryError, match="this trainer is at its beginning"):
        third.step(next(iter(loader.epoch(0))))
