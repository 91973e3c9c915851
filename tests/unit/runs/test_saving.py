"""Who writes a checkpoint when rank 0 is lost; by real losses in tests/process/test_lost_workers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint.file import load_checkpoint
from lockstep.comm import World
from lockstep.engine.trainer import Trainer
from lockstep.events import Recorders
from lockstep.runs.config import parse_config
from lockstep.runs.saving import RunSaver

NAME = "step-00000000.ckpt"


def world(rank: int) -> World:
    return World(rank=rank, world_size=3, group=None)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss=lambda model, batch: model(batch).mean(), num_shards=3)
    monkeypatch.setattr(Trainer, "can_continue", True)
    return trainer


def save_as(rank: int, trainer: Trainer, folder: Path) -> tuple[RunSaver, str]:
    """Let a worker of this rank save; return its saver, and the digest of what was saved. Then the state changes."""
    saver = RunSaver(parse_config({"model": "a:b", "data": "a:c"}, "config"), folder, Recorders([]))
    trainer.engine.world = world(rank)
    saver.save(trainer, None, {"loss": 0.5})
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
    saver.take_over(trainer, None, world(1))  # another worker has rank 0
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.{'0' * 32}.tmp"]
    saver.take_over(trainer, None, world(0))
    saver.take_over(trainer, None, world(0))
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    # Rank 1 has kept the state that was to be written, the others write what they have.
    assert written(tmp_path / NAME) == (digest if rank == 1 else trainer.digest())


def test_what_the_lost_one_has_written_is_kept(trainer: Trainer, tmp_path: Path) -> None:
    first, digest = save_as(0, trainer, tmp_path)
    first.wait()
    before = (tmp_path / NAME).stat().st_ino
    saver, _ = save_as(1, trainer, tmp_path)
    saver.take_over(trainer, None, world(0))
    saver.wait()
    assert (tmp_path / NAME).stat().st_ino == before
    assert written(tmp_path / NAME) == digest


def test_a_worker_without_a_save_before_it_takes_over_nothing(trainer: Trainer, tmp_path: Path) -> None:
    saver = RunSaver(parse_config({"model": "a:b", "data": "a:c"}, "config"), tmp_path, Recorders([]))
    saver.take_over(trainer, None, world(0))
    assert list(tmp_path.iterdir()) == []
