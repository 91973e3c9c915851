"""Shards that have nothing to learn from: what only they use is updated as in a plain loop."""

from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.means import Mean

NUM_SHARDS = 3


class Branches(nn.Module):
    """A model with one part for samples that count, and another for those that do not."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 4, sparse=sparse)
        self.counted, self.other, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        hidden, counts = self.words(words), words < 3
        parts = [self.counted(hidden[counts]), self.other(hidden[~counts])]
        return torch.cat([part for part in parts if len(part)])


def data() -> TensorDataset:
    return TensorDataset(torch.tensor([0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0, 0, 1, 2, 1, 0, 2]))


def loss(model: nn.Module, batch: Any) -> Mean:
    """Return the mean over samples that count, which is 0 / 0 where there are none, and their number."""
    (words,) = batch
    weights = torch.cat([(words < 3)[words < 3], (words < 3)[words >= 3]]).float()[:, None]
    return Mean((model(words).square() * weights).sum(), weights.sum())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def run(world: World, *, sparse: bool) -> tuple[str, dict[str, Tensor]]:
    model = Branches(sparse=sparse)
    trainer = Trainer(model, optimizer_of(model), loss=loss, num_shards=NUM_SHARDS, world=world)
    for batch in ShardedLoader(data(), batch_size=9, num_shards=NUM_SHARDS, shuffle=False, world=world).epoch(0):
        trainer.step(batch)
    return trainer.digest(), model.state_dict()


@pytest.mark.parametrize("sparse", [False, True])
def test_what_only_shards_without_weight_use_is_updated_as_in_a_plain_loop(*, sparse: bool) -> None:
    answers = [answer for size in (1, 2, 3) for answer in run_ranks(size, lambda world: run(world, sparse=sparse))]
    assert len({digest for digest, _ in answers}) == 1
    plain = Branches()
    optimizer = optimizer_of(plain)
    for words in data().tensors[0].split(9):
        optimizer.zero_grad()
        total, weight = loss(plain, (words,))
        (total / weight).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(answers[0][1][name], value, msg=name)
