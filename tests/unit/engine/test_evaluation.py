"""What an evaluation leaves behind: nothing that depends on the number of workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer

NUM_SHARDS = 3


class Observed(nn.Module):
    """A model whose forward writes buffers in evaluation too: a counter, a maximum, and one that is replaced."""

    count: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        self.largest = torch.maximum(self.largest, inputs.abs().max())
        return self.norm(self.layer(inputs)) * self.count


def data() -> TensorDataset:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.argmax(1) % 3)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return loss(model, batch) * len(batch[1]), len(batch[1])


def monte_carlo(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    model.train()  # for the dropout of a Monte-Carlo estimate, and BatchNorm with it
    return summed(model, batch)


def left_in_training(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    found = summed(model, batch)
    model.train()  # as after an evaluation in a loop of one's own
    return found


def run(world: World, metric: Callable[..., Any]) -> tuple[bool, float, str]:
    """Return whether the evaluation has left the model as it was, its result, and the digest after another epoch."""
    model = Observed()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loss=loss, num_shards=NUM_SHARDS, world=world)
    loader = ShardedLoader(data(), batch_size=9, num_shards=NUM_SHARDS, world=world)
    for batch in loader.epoch(0):
        trainer.step(batch)
    before = trainer.digest()
    found = trainer.evaluate(loader, metric)["metric"]
    is_left = trainer.digest() == before
    for batch in loader.epoch(1):
        trainer.step(batch)
    return is_left, found.total, trainer.digest()


@pytest.mark.parametrize("metric", [summed, monte_carlo, left_in_training])
def test_buffers_that_an_evaluation_writes_are_put_back(metric: Callable[..., Any]) -> None:
    found = {answer for size in (1, 2, 3) for answer in run_ranks(size, lambda world: run(world, metric))}
    ((is_left, _, _),) = found
    assert is_left


def test_buffers_are_put_back_when_the_metric_fails() -> None:
    model = Observed()
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loss=loss, num_shards=NUM_SHARDS)
    before = trainer.digest()

    def fail(model: nn.Module, batch: Any) -> Any:
        model(batch[0])
        raise KeyError("no such class")

    with pytest.raises(KeyError):
        trainer.evaluate(ShardedLoader(data(), batch_size=9, num_shards=NUM_SHARDS), fail)
    assert trainer.digest() == before
