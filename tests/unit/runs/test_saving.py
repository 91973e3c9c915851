"""Who writes a checkpoint when rank 0 is lost; by real losses in tests/process/test_lost_workers."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.file import load_checkpoint
from lockstep.comm import World
from lockstep.engine.present import PresentEngine
from lockstep.engine.trainer import Trainer
from lockstep.errors import ConfigError
from lockstep.events import Recorders
from lockstep.runs.config import parse_config
from lockstep.runs.saving import (
    RunSaver,
    SavedCheckpoint,
    check_metric_name,
    choose_checkpoints_to_remove,
    find_best,
    score_of,
)

NAME = "step-00000000.ckpt"


def world(rank: int) -> World:
    return World(rank=rank, world_size=3, group=None)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss=lambda model, batch: model(batch).mean(), num_shards=3)
    monkeypatch.setattr(PresentEngine, "can_continue", True)
    return trainer


def saver_of(trainer: Trainer, folder: Path) -> RunSaver:
    parts: Any = SimpleNamespace(trainer=trainer, scheduler=None, states={})
    return RunSaver(parse_config({"model": "a:b", "data": "a:c"}, "config"), folder, Recorders([]), parts)


def save_as(rank: int, trainer: Trainer, folder: Path) -> tuple[RunSaver, str]:
    """Let a worker of this rank save; return its saver, and the digest of what was saved. Then the state changes."""
    saver = saver_of(trainer, folder)
    trainer.internals.engine.world = world(rank)
    saver.save({"loss": 0.5})
    digest = trainer.digest()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    return saver, digest


def written(path: Path) -> str:
    return load_checkpoint(path).manifest.digest


@pytest.mark.parametrize("rank", [1, 2])
def test_the_next_rank_0_writes_what_the_lost_one_has_not_written(rank: int, trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.{'0' * 32}.tmp").touch()  # as a killed writer leaves it
    saver, digest = save_as(rank, trainer, tmp_path)
    saver.take_over(world(1))  # another worker has rank 0
    saver.writing.wait()
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.{'0' * 32}.tmp"]
    saver.take_over(world(0))
    saver.take_over(world(0))
    saver.writing.wait()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    # Rank 1 has kept the state that was to be written, the others write what they have.
    assert written(tmp_path / NAME) == (digest if rank == 1 else trainer.digest())


def test_what_the_lost_one_has_written_is_kept(trainer: Trainer, tmp_path: Path) -> None:
    first, digest = save_as(0, trainer, tmp_path)
    first.writing.wait()
    before = (tmp_path / NAME).stat().st_ino
    saver, _ = save_as(1, trainer, tmp_path)
    saver.take_over(world(0))
    saver.writing.wait()
    assert (tmp_path / NAME).stat().st_ino == before
    assert written(tmp_path / NAME) == digest


def test_a_worker_without_a_save_before_it_takes_over_nothing(trainer: Trainer, tmp_path: Path) -> None:
    saver = saver_of(trainer, tmp_path)
    saver.take_over(world(0))
    assert list(tmp_path.iterdir()) == []


# -- Which checkpoints stay --------------------------------------------------------------------------------------------


def saved(*entries: tuple[int, float | None] | int, broken: tuple[int, ...] = ()) -> list[SavedCheckpoint]:
    pairs = [(entry, None) if isinstance(entry, int) else entry for entry in entries]
    return [SavedCheckpoint(global_step=step, score=score, is_intact=step not in broken) for step, score in pairs]


def removed(found: list[SavedCheckpoint], keep: int, written: int = 4) -> list[int]:
    return sorted(each.global_step for each in choose_checkpoints_to_remove(found, keep, written))


def test_the_newest_stay() -> None:
    assert removed(saved(1, 2, 3, 4), keep=2) == [1, 2]
    assert removed(saved(4, 1, 3), keep=5) == []


def test_the_best_stays_besides() -> None:
    assert removed(saved((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)), keep=1) == [1, 3]
    assert removed(saved((1, 0.5), (2, 0.9), (3, 0.95)), keep=1) == [1, 2]


def test_of_equals_the_oldest_is_the_best() -> None:
    best = find_best(saved((1, 0.5), (2, 0.9), (3, 0.9)))
    assert best is not None
    assert best.global_step == 2


def test_a_damaged_one_neither_counts_nor_is_best() -> None:
    assert removed(saved(1, 2, 3, broken=(3,)), keep=1) == [1]
    assert removed(saved(1, 2, broken=(2,)), keep=1) == []  # the only whole one
    assert removed(saved(1, 2, 3, broken=(1,)), keep=2) == [1]
    assert find_best(saved((1, 0.9), broken=(1,))) is None


def test_what_is_newer_than_the_one_just_written_does_not_take_its_place() -> None:
    # A run was taken back to step 1, for a bit had flipped in a tensor of 3 and of 4; headers were intact. At its next
    # save the new checkpoint and the one it had gone on from were removed, and the two damaged ones stayed.
    assert removed(saved(1, 2, 3, 4), keep=2, written=2) == []
    assert removed(saved(0, 1, 2, 3, 4), keep=2, written=2) == [0]


@pytest.mark.parametrize(
    ("wanted", "score"),
    [
        ("accuracy", 0.9),
        ("-accuracy", -0.9),
        ("loss", None),
        ("kappa", 0.5),
        ("-kappa", -0.5),
        ("mse", -2.0),
        ("-mse", -2.0),
        ("gone", None),
        (None, None),
    ],
)
def test_scores_are_higher_the_better(wanted: str | None, score: float | None) -> None:
    assert score_of({"accuracy": 0.9, "loss": None, "kappa": 0.5, "mse": 2.0}, wanted) == score
    assert score_of({"accuracy": math.nan}, "accuracy") is None


def test_a_metric_that_is_not_measured_is_refused() -> None:
    check_metric_name("-loss", {"loss": 1.0})
    check_metric_name(None, {})
    with pytest.raises(ConfigError, match=r"keep_best is .acc., .* Expected loss or accuracy or kappa or -kappa;"):
        check_metric_name("acc", {"loss": 1.0, "accuracy": 0.5, "kappa": 0.5})
    with pytest.raises(ConfigError, match="needs a set to evaluate"):
        check_metric_name("accuracy", {})


def test_keeping_the_lowest_accuracy_is_refused() -> None:
    measured = dict.fromkeys(
        ["ema_val_loss", "MeanSquaredError", "val_accuracy", "val_mAP", "neg_log_loss", "kappa"], 1.0
    )
    for wanted, said in [
        ("-val_mAP", "Write 'val_mAP'"),
        ("-val_accuracy", "keep the lowest val_accuracy. Write 'val_accuracy'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            check_metric_name(wanted, measured)
    for wanted in (
        "-ema_val_loss",
        "ema_val_loss",
        "MeanSquaredError",
        "val_accuracy",
        "neg_log_loss",
        "-neg_log_loss",
        "kappa",
        "-kappa",
    ):
        check_metric_name(wanted, measured)
