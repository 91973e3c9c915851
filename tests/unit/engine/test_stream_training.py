"""Training on a stream: the same bits on any number of workers, stopped and resumed on others."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import lockstep as ls
from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer

NUM_EPOCHS = 2
PARTS = [13, 40, 0, 22]


class Points(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points, which tell their place."""

    def __init__(self, length: int = 75, first: int = 0) -> None:
        self.length = length
        self.first = first
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            yield make_point(self.first + self.place)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def make_point(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, generator=generator), torch.randint(2, (), generator=generator)


def read(part: int) -> Iterator[int]:
    yield from range(sum(PARTS[:part]), sum(PARTS[: part + 1]))


def noisy(number: int) -> Any:
    inputs, target = make_point(number)
    return inputs + 0.1 * torch.randn(3), target


def make_stream(kind: str) -> Any:
    return {
        "stateful": Points(),
        "parts": ls.Stream(range(4), read=read, transform=noisy, buffer_size=20),
        "lengths": ls.Stream(range(4), read=read, transform=noisy, buffer_size=20, lengths=PARTS),
        "endless": ls.Stream(Points(20), steps_per_epoch=9, buffer_size=16),
    }[kind]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(world: World, kind: str, path: Path, stop_after: int) -> tuple[str, Any] | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=3, world=world)
    loader = ls.ShardedLoader(make_stream(kind), batch_size=8, num_shards=3, world=world)
    if path.exists():
        trainer.load(path, extra={"loader": loader})
    for epoch in range(trainer.cursor.epoch, NUM_EPOCHS):
        for batch in loader.epoch(epoch, trainer.cursor.step):
            trainer.step(batch)
            if trainer.global_step == stop_after:
                trainer.save(path, extra={"loader": loader})
                return None
    test = ls.ShardedLoader(make_stream("parts"), batch_size=8, num_shards=3, shuffle=False, world=world)
    return trainer.digest(), trainer.evaluate(test, accuracy)


def accuracy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])


@pytest.mark.parametrize("kind", ["stateful", "parts", "lengths", "endless"])
def test_same_bits_on_any_number_of_workers_and_when_resumed_twice_on_others(kind: str, tmp_path: Path) -> None:
    def run(num_ranks: int, name: str, stop_after: int = 0) -> list[Any]:
        return run_ranks(num_ranks, lambda world: train(world, kind, tmp_path / name, stop_after))

    results = [*run(1, "a"), *run(2, "b"), *run(3, "c")]
    assert run(2, "d", stop_after=4) == [None] * 2
    assert run(3, "d", stop_after=13) == [None] * 3
    results += run(1, "d")
    assert results == [results[0]] * 7
    assert results[0][1]["metric"].weight == sum(PARTS)


def test_workers_whose_streams_differ_stop_in_the_same_step() -> None:
    def program(world: World) -> str:
        model = nn.Linear(3, 2)
        trainer = ls.Trainer(model, torch.optim.SGD(model.parameters()), loss=loss, num_shards=2, world=world)
        # As of a file that one host has not whole.
        stream = ls.Stream(Points(length=40 - 8 * world.rank), buffer_size=8)
        batches = ls.ShardedLoader(stream, batch_size=8, num_shards=2, world=world).epoch(0)
        with pytest.raises(ValueError, match="other records") as caught:
            list(map(trainer.step, batches))
        return f"{trainer.global_step} {caught.value}"

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith("3 ")  # the next batch is the last one of rank 1 alone


def test_workers_that_read_other_records_are_told_in_the_first_step() -> None:
    def program(world: World) -> None:
        model = nn.Linear(3, 2)
        trainer = ls.Trainer(model, torch.optim.SGD(model.parameters()), loss=loss, num_shards=2, world=world)
        loader = ls.ShardedLoader(Points(first=world.rank * 100), batch_size=8, num_shards=2, world=world)
        with pytest.raises(ValueError, match="a stream that gives each rank or each reading other records"):
            trainer.step(next(loader.epoch(0)))
        assert trainer.global_step == 0

    run_ranks(2, program)


# -- Data that differ between the ranks --------------------------------------------------------------------------------


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


def loss_of_words(model: nn.Module, batch: Any) -> Tensor:
    numbers, noise = batch if isinstance(batch, tuple) else (batch["number"], batch["noise"])
    return (model(numbers).sum(1) * noise).mean()


def train_words(world: World, *, sorts: bool, collates: bool, evaluates: bool = False) -> str:
    torch.manual_seed(0)
    vocabulary = sorted(WORDS) if sorts else random.Random(world.rank).sample(WORDS, len(WORDS))
    model = nn.Embedding(len(WORDS), 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of_words, num_shards=4, world=world)
    collate = collate_words if collates else None
    loader = ShardedLoader(Tokens(vocabulary), batch_size=8, num_shards=4, collate_fn=collate, world=world)
    if evaluates:
        trainer.evaluate(loader, lambda model, batch: (loss_of_words(model, batch), 1.0))
    for batch in loader.epoch(0):
        trainer.step(batch)
    return trainer.digest()


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_vocabulary_in_another_order_is_an_error_on_every_rank(*, collates: bool, evaluates: bool) -> None:
    def fail(world: World) -> str:
        with pytest.raises(ValueError, match=r"different.*vocabulary built from a set") as error:
            train_words(world, sorts=False, collates=collates, evaluates=evaluates)
        return str(error.value)

    first, second = run_ranks(2, fail)
    assert first == second


@pytest.mark.parametrize("collates", [False, True])
def test_random_samples_with_generators_of_their_own_are_the_same_data(*, collates: bool) -> None:
    digests = {
        digest
        for size in (1, 2, 3)
        for digest in run_ranks(size, lambda world: train_words(world, sorts=True, collates=collates, evaluates=True))
    }
    assert len(digests) == 1
