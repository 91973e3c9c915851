"""Runs of many kinds whose weights must have the same bits on any number of workers."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.comm import World

NUM_SHARDS = 5
NUM_EPOCHS = 2
Metric = Callable[[nn.Module, Any], tuple[Tensor, float]]


class Case(NamedTuple):
    """One kind of run; `make` is called in each worker."""

    trainer: ls.Trainer
    loader: ls.ShardedLoader
    metric: Metric


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(43, 1, 6, 6, generator=generator)
    return TensorDataset(inputs, inputs.mean((1, 2, 3)).gt(0).long())


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from every global generator."""

    def __len__(self) -> int:
        return 43

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            words = words.flip(0)
        if np.random.rand() < 0.3:  # noqa: NPY002 - what user code does
            words = words.roll(1)
        if torch.rand(()) < 0.5:
            words[0] = 0
        return words, words.sum() % 3


class Text(nn.Module):
    """A transformer with a part that no shard uses, and one that some shards use."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=sparse)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.sometimes = nn.Linear(32, 32)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(32, 3)

    def forward(self, words: Tensor) -> Tensor:
        found = self.encoder(self.embedding(words))
        if words[0, 0] % 2 == 0:
            found = found + self.sometimes(found)
        scores: Tensor = self.head(found.mean(1))
        return scores


def image_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 300), nn.ReLU()
    ).append(nn.Linear(300, 2))


def text_net(*, sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Text(sparse=sparse)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), float(len(batch[1]))


def half_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return mean_loss(model, batch)


def token_loss(model: nn.Module, batch: Any) -> ls.Mean:
    """Weigh by what counts in a slice; some slices have nothing."""
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(batch[0])
    counts = batch[1] != 1
    losses = nn.functional.cross_entropy(scores.float(), batch[1], reduction="none")
    return ls.Mean((losses * counts).sum(), counts.sum())


def make_rank_0_slow(trainer: ls.Trainer) -> None:
    """Let rank 0 measure four times as long for a shard as the others."""
    stopwatch: Any = trainer.internals.engine.runs.stopwatch
    if stopwatch is not None:  # there are other workers
        stopwatch.seconds_per_shard = lambda: 0.1 if trainer.world.rank else 0.4


def convolution(world: World | None) -> Case:
    """Conv, BatchNorm, dropout, AdamW, clipping; the last batch has 3 samples for 5 shards."""
    model = image_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = ls.Trainer(
        model, optimizer, loss=mean_loss, num_shards=NUM_SHARDS, seed=4, max_grad_norm=1.0, world=world
    )
    loader = ls.ShardedLoader(images(), batch_size=10, num_shards=NUM_SHARDS, seed=4, world=world)
    return Case(trainer, loader, summed_loss)


def scaled(world: World | None) -> Case:
    """float16 with a GradScaler whose first steps overflow."""
    model = image_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    trainer = ls.Trainer(model, optimizer, loss=half_loss, num_shards=NUM_SHARDS, scaler=scaler, world=world)
    loader = ls.ShardedLoader(images(), batch_size=10, num_shards=NUM_SHARDS, world=world)
    return Case(trainer, loader, summed_loss)


def transformer(world: World | None) -> Case:
    """bfloat16 autocast, weights by tokens, a schedule, augmentation in loading processes."""
    model = text_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    trainer = ls.Trainer(
        model, optimizer, loss=token_loss, num_shards=NUM_SHARDS, seed=7, scheduler=schedule, world=world
    )
    loader = ls.ShardedLoader(Augmented(), batch_size=11, num_shards=NUM_SHARDS, seed=7, num_workers=2, world=world)
    return Case(trainer, loader, summed_loss)


def sparse_embedding(world: World | None) -> Case:
    """Sparse gradients, reduced as dense ones; shards that move from a slow worker to others."""
    model = text_net(sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    trainer = ls.Trainer(
        model,
        optimizer,
        loss=mean_loss,
        num_shards=NUM_SHARDS,
        balance="speed",
        world=world,
        exact_mean=False,  # the first sample of a slice decides which layers it runs through
    )
    make_rank_0_slow(trainer)
    loader = ls.ShardedLoader(Augmented(), batch_size=10, num_shards=NUM_SHARDS, world=world)
    return Case(trainer, loader, summed_loss)


CASES: dict[str, Callable[[World | None], Case]] = {
    "convolution": convolution,
    "scaled": scaled,
    "transformer": transformer,
    "sparse_embedding": sparse_embedding,
}
