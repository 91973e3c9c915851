"""One checkpoint of several trainers, as of a generator and a discriminator: the state of all, or of none."""

from pathlib import Path

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm import World

NUM_STEPS = 4
SAVED_AFTER = 2


class Pair:
    """Two trainers with a network, an optimizer and a loader each."""

    def __init__(self, world: World | None, *, width: int = 4) -> None:
        torch.manual_seed(0)
        generator = nn.Linear(3, 3)
        discriminator = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        steps = torch.optim.SGD(discriminator.parameters(), 0.01, momentum=0.9)
        self.trainers = [
            ls.Trainer(
                generator,
                torch.optim.AdamW(generator.parameters(), 0.01),
                loss=lambda model, batch: model(batch[0]).square().mean(),
                num_shards=2,
                world=world,
            ),
            ls.Trainer(
                discriminator,
                steps,
                loss=lambda model, batch: model(batch[0]).square().mean(),
                num_shards=2,
                seed=1,
                scheduler=torch.optim.lr_scheduler.StepLR(steps, 2, 0.5),
                world=world,
            ),
        ]
        rows = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1)))
        self.loaders = [ls.ShardedLoader(rows, batch_size=8, num_shards=2, seed=seed, world=world) for seed in (0, 1)]

    def train(self, stop: int) -> None:
        start = self.trainers[0].cursor.step
        for trainer, loader in zip(self.trainers, self.loaders, strict=True):
            for _, batch in zip(range(start, stop), loader.epoch(0, start), strict=False):
                trainer.step(batch)

    def digests(self) -> list[str]:
        return [trainer.digest() for trainer in self.trainers]

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


def test_trainers_resume_together_from_one_file_on_another_number_of_workers(tmp_path: Path) -> None:
    def save(world: World) -> list[str]:
        pair = Pair(world)
        pair.train(SAVED_AFTER)
        first, second = pair.trainers
        first.save(tmp_path / "both.ckpt", extra={"discriminator": second})
        pair.train(NUM_STEPS)
        digests = pair.digests()
        pair.close()
        return digests

    (expected, _) = run_ranks(2, save)
    pair = Pair(None)
    first, second = pair.trainers
    first.load(tmp_path / "both.ckpt", extra={"discriminator": second})
    assert second.cursor == first.cursor
    assert first.cursor.step == SAVED_AFTER
    pair.train(NUM_STEPS)
    assert pair.digests() == expected


def test_where_one_trainer_cannot_take_its_state_none_is_changed(tmp_path: Path) -> None:
    pair = Pair(None)
    pair.train(SAVED_AFTER)
    first, second = pair.trainers
    first.save(tmp_path / "both.ckpt", extra={"discriminator": second})
    other = Pair(None, width=5)
    before = other.digests()
    with pytest.raises(ls.CheckpointError):
        other.trainers[0].load(tmp_path / "both.ckpt", extra={"discriminator": other.trainers[1]})
    assert other.digests() == before
    assert [trainer.cursor.step for trainer in other.trainers] == [0, 0]


def test_a_load_that_fails_is_no_beginning() -> None:
    # What the other trainer loaded of this model, which its loss uses, was then left out.
    pair = Pair(None)
    state = pair.trainers[0].state_dict()
    with pytest.raises(ls.CheckpointError):
        pair.trainers[0].load_state_dict({**state, "model": {"weight": torch.zeros(5, 5)}})
    used = pair.trainers[0].model
    critic = nn.Linear(3, 1)
    other = ls.Trainer(
        critic,
        torch.optim.SGD(critic.parameters(), 0.1),
        loss=lambda model, batch: model(used(batch[0])).square().mean(),
        num_shards=2,
    )
    saved = other.state_dict()
    ((name, values),) = saved["networks"].items()
    other.load_state_dict({**saved, "networks": {name: {key: torch.ones_like(each) for key, each in values.items()}}})
    assert torch.equal(used.weight, torch.ones(3, 3))
