"""Data that differ between the ranks stop a run, whatever holds them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer

WORDS = ("cat", "dog", "fish", "bird", "horse", "cow")


class Tokens(Dataset[Any]):
    """Words as numbers of a vocabulary, augmented at random."""

    def __init__(self, vocabulary: list[str]) -> None:
        self.numbers = {word: number for number, word in enumerate(vocabulary)}
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        word = WORDS[index % len(WORDS)]
        noise = random.random() + torch.rand(()).item() + self.generator.random()
        return {"word": word, "number": self.numbers[word], "noise": noise}


def collate_words(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor([each["number"] for each in samples]), torch.tensor([each["noise"] for each in samples])


def loss(model: nn.Module, batch: Any) -> Tensor:
    numbers, noise = batch if isinstance(batch, tuple) else (batch["number"], batch["noise"])
    return (model(numbers).sum(1) * noise).mean()


def train(world: World, *, sorts: bool, collates: bool, evaluates: bool = False) -> str:
    torch.manual_seed(0)
    vocabulary = sorted(WORDS) if sorts else random.Random(world.rank).sample(WORDS, len(WORDS))
    model = nn.Embedding(len(WORDS), 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=4, world=world)
    collate = collate_words if collates else None
    loader = ShardedLoader(Tokens(vocabulary), batch_size=8, num_shards=4, collate_fn=collate, world=world)
    if evaluates:
        trainer.evaluate(loader, lambda model, batch: (loss(model, batch), 1.0))
    for batch in loader.epoch(0):
        trainer.step(batch)
    return trainer.digest()


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_vocabulary_in_another_order_is_an_error_on_every_rank(*, collates: bool, evaluates: bool) -> None:
    def fail(world: World) -> str:
        with pytest.raises(ValueError, match=r"different.*vocabulary built from a set") as error:
            train(world, sorts=False, collates=collates, evaluates=evaluates)
        return str(error.value)

    first, second = run_ranks(2, fail)
    assert first == second


@pytest.mark.parametrize("collates", [False, True])
def test_random_samples_with_generators_of_their_own_are_the_same_data(*, collates: bool) -> None:
    digests = {
        digest
        for size in (1, 2, 3)
        for digest in run_ranks(size, lambda world: train(world, sorts=True, collates=collates, evaluates=True))
    }
    assert len(digests) == 1
