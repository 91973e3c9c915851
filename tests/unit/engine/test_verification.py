"""`Trainer.verify`: what depends on who runs which shard is named, and everything is as it was."""

import random
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from tests.unit.engine.test_trainer import data, mean_loss
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.errors import LossError

ALONE = World(rank=0, world_size=1, group=None)


def make(world: World, loss: Any = mean_loss, dataset: Any = None) -> tuple[Trainer, ShardedLoader]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    trainer = Trainer(net, torch.optim.Adam(net.parameters()), loss=loss, num_shards=4, world=world)
    return trainer, ShardedLoader(dataset or data(24), batch_size=8, num_shards=4, seed=3, world=world)


def verify_and_train(world: World) -> tuple[bool, str, str]:
    trainer, loader = make(world)
    first, *others = loader.epoch(0)
    trainer.step(first)
    before, drawn = trainer.digest(), random.getstate()
    trainer.verify(loader)
    is_same = trainer.digest() == before and random.getstate() == drawn and trainer.global_step == 1
    for batch in others:
        trainer.step(batch)
    other, _ = make(world)
    for batch in loader.epoch(0):
        other.step(batch)
    return is_same, trainer.digest(), other.digest()


@pytest.mark.parametrize("workers", [1, 2])
def test_verifying_changes_nothing(workers: int) -> None:
    answers = [verify_and_train(ALONE)] if workers == 1 else run_ranks(workers, verify_and_train)
    for is_same, verified, plain in answers:
        assert is_same
        assert verified == plain


def test_state_in_a_closure_is_named() -> None:
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].mean())
        return mean_loss(model, batch) * (1 + torch.stack(seen).mean().abs())

    trainer, loader = make(ALONE, loss)
    before = trainer.digest()
    with pytest.raises(LossError, match=r"the loss and \d more have other bits in shard 0 when other.*loss: seen"):
        trainer.verify(loader)
    assert trainer.digest() == before


def test_a_loss_that_depends_on_the_rank_is_named_on_every_worker() -> None:
    def program(world: World) -> str:
        trainer, loader = make(world, lambda model, batch: mean_loss(model, batch) * (1 + world.rank))
        with pytest.raises(LossError) as failure:
            trainer.verify(loader)
        return str(failure.value)

    assert all("other bits in shard 0 on rank 1 than on rank 0" in text for text in run_ranks(2, program))


def test_a_data_set_that_remembers_is_named() -> None:
    class Remembers(Dataset[tuple[Tensor, Tensor]]):
        count = 0

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.count += 1
            inputs, target = data(24)[index]
            return inputs + self.count, target

    trainer, loader = make(ALONE, dataset=Remembers())
    with pytest.raises(LossError, match="data set gives other data for the samples of shard 0"):
        trainer.verify(loader)
