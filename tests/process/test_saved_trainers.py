"""`Trainer.save`, `Trainer.load` and `Trainer.request_stop` where several workers call them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tests.process.ranks import call_on_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR as cosine  # noqa: N813
from torch.utils.data import TensorDataset

import lockstep as ls

NUM_EPOCHS = 2


def make(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, ls.Trainer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimized = optimizer(net.parameters(), lr=0.01)  # type: ignore[call-arg]
    schedule = torch.optim.lr_scheduler.StepLR(optimized, 1, gamma=0.5)
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    loader = ls.ShardedLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, num_shards=4, seed=1)
    return loader, schedule, ls.Trainer(net, optimized, loss=mean_loss, num_shards=4, **options)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def finish(parts: tuple[Any, Any, ls.Trainer]) -> str:
    loader, schedule, trainer = parts
    for epoch in range(trainer.cursor.epoch, NUM_EPOCHS):
        for batch in loader.epoch(epoch, trainer.cursor.step):
            trainer.step(batch)
        schedule.step()
    return trainer.digest()


def stop_and_save(run: ls.Run, folder: Path) -> tuple[int, str, float]:
    """Train until rank 1 alone is asked to stop, in its third step of the second epoch."""
    loader, schedule, trainer = make()
    for epoch in range(NUM_EPOCHS):
        for batch in loader.epoch(epoch):
            if run.rank == 1 and trainer.global_step == 7:
                trainer.request_stop()
            if trainer.step(batch).should_stop:
                metrics: dict[str, Any] = {"loss": torch.tensor(0.5), "odd": float("nan")}  # JSON knows no tensor
                path = trainer.save(folder, scheduler=schedule, metrics=metrics)
                return trainer.global_step, path.name, path.stat().st_size
        schedule.step()
    raise AssertionError


def said(call: Any) -> str:
    try:
        call()
    except ls.CheckpointError as error:
        return str(error)
    return "nothing"


def load_and_go_on(run: ls.Run, folder: Path) -> Any:
    parts = make()
    loaded = parts[2].load(folder, scheduler=parts[1])
    return loaded.path.name, tuple(vars_of(loaded)), finish(parts)


def vars_of(loaded: Any) -> Any:
    return loaded.cursor.epoch, loaded.cursor.step, loaded.global_step, dict(loaded.metrics)


def self_stepped() -> ls.Trainer:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimized = torch.optim.AdamW(net.parameters(), lr=0.01)
    return ls.Trainer(net, optimized, loss=mean_loss, num_shards=4, scheduler=cosine(optimized, 10))


def refused(run: ls.Run, folder: Path) -> dict[str, Any]:
    """Return what is said where files are not what they should be, on one rank or on all."""
    loader, schedule, trainer = make()
    before = trainer.digest()
    good, broken, other = folder / "good.ckpt", folder / "broken.ckpt", folder / "other.ckpt"
    trainer.save(good, scheduler=schedule)
    trainer.step(next(loader.epoch(0)))
    trainer.save(other, scheduler=schedule)
    if run.rank == 0:
        shutil.copy(good, broken)
        with broken.open("r+b") as file:
            file.seek(-3, 2)
            file.write(b"???")
    stepped = self_stepped().save(folder / "stepped.ckpt")
    trainer = make()[2]
    found = {
        "missing on one": said(lambda: trainer.load(folder / "gone.ckpt" if run.rank == 1 else good)),
        "broken": said(lambda: trainer.load(broken, scheduler=schedule)),
        "different": said(lambda: trainer.load(good if run.rank == 0 else other, scheduler=schedule)),
        "no scheduler": said(lambda: trainer.load(good)),
        "another optimizer": said(lambda: make(torch.optim.RMSprop)[2].load(good, scheduler=schedule)),
        "almost the same optimizer": said(lambda: make(torch.optim.Adam)[2].load(good, scheduler=schedule)),
        "another scheduler": said(lambda: trainer.load(good, scheduler=cosine(trainer.optimizer, 10))),
        "stepped by the trainer": said(lambda: self_stepped().load(good)),
        "not stepped by the trainer": said(lambda: trainer.load(stepped, scheduler=schedule)),
        "another seed": said(lambda: make(seed=3)[2].load(good, scheduler=schedule)),
        "nowhere to write": said(lambda: trainer.save(good / "below" / "a.ckpt")),
        "empty folder": said(lambda: trainer.load(Path(__file__).parent)),
    }
    assert trainer.digest() == before
    assert not list(folder.glob(".*.tmp"))
    return found


def test_a_trainer_that_was_stopped_goes_on_from_its_file(tmp_path: Path) -> None:
    undisturbed = finish(make())
    step, name, size = call_on_ranks(2, stop_and_save, tmp_path)[0]
    assert (step, name) == (8, "step-00000008.ckpt")  # the very step in which one worker was asked
    assert size > 0
    (tmp_path / "step-00000009.ckpt").write_bytes(b"broken")
    for answer in call_on_ranks(3, load_and_go_on, tmp_path):
        assert answer == (name, (1, 3, 8, {"loss": 0.5, "odd": None}), undisturbed)


def test_what_is_wrong_with_a_file_is_said_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = call_on_ranks(2, refused, tmp_path)
    assert "gone.ckpt cannot be read" in second["missing on one"]
    assert "Rank 1 has failed in reading a checkpoint: CheckpointError" in first["missing on one"]
    for found in (first, second):
        assert "is damaged" in found["broken"]
        assert "The ranks have read different checkpoints: rank 0" in found["different"]
        assert "The checkpoint has a scheduler, and this run has none" in found["no scheduler"]
        assert "saved with optimizer AdamW, and this run has RMSprop" in found["another optimizer"]
        # These four were taken without a word: the states look alike, or nobody looks at them at all.
        assert "saved with optimizer AdamW, and this run has Adam:" in found["almost the same optimizer"]
        assert "has a StepLR, and this run a CosineAnnealingLR" in found["another scheduler"]
        assert "has a StepLR that was not stepped by the trainer" in found["stepped by the trainer"]
        assert "has a CosineAnnealingLR that the trainer has stepped" in found["not stepped by the trainer"]
        assert "Set seed to 0" in found["another seed"]
        assert "cannot be created" in found["nowhere to write"]
        assert "holds no checkpoint" in found["empty folder"]
