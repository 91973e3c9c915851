"""Generators that the model or the loss holds draw the same numbers on any number of workers."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.errors import LossError

NUM_SHARDS = 3


class Noise(nn.Module):
    """A layer with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


class Drawing(nn.Module):
    """A model that draws from its own generators and one that it makes in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 3), Noise(), Noise())
        self.draws: dict[str, Any] = {"numpy": np.random.default_rng(1), "python": random.Random(2)}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) * self.draws["numpy"].random() + self.draws["python"].random()


def make_loss() -> Callable[[nn.Module, Any], Tensor]:
    generator = np.random.RandomState(3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).square() * generator.rand()).mean()

    return loss


def run(world: World) -> tuple[str, float, list[float]]:
    """Return the digest, a metric, and what the model's generator gives between two steps, also after a failed one."""
    model, fails = Drawing(), [False]
    loss = make_loss()

    def failing(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        if fails[0] and world.rank == world.world_size - 1:
            raise KeyError("at times")
        return value

    data = TensorDataset(torch.randn(18, 4, generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=failing, num_shards=NUM_SHARDS, world=world
    )
    loader = ShardedLoader(data, batch_size=9, num_shards=NUM_SHARDS, world=world)
    between = []
    for batch in loader.epoch(0):
        fails[0] = True
        with pytest.raises((KeyError, RuntimeError)):
            trainer.step(batch)
        fails[0] = False
        trainer.step(batch)
        between.append(model.draws["python"].random())
    found = trainer.evaluate(loader, lambda model, batch: (loss(model, batch), 1.0))["metric"].total
    return trainer.digest(), found, [*between, model.draws["python"].random()]


def test_generators_of_model_and_loss_draw_the_same_on_any_number_of_workers() -> None:
    first, *others = [answer for size in (1, 2, 3) for answer in run_ranks(size, run)]
    assert all(other == first for other in others)


class Unpooled(nn.Module):
    """A model with an operation that has no deterministic form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        values, indices = nn.functional.max_pool1d(self.layer(inputs)[:, None], 2, return_indices=True)
        return nn.functional.max_unpool1d(values, indices, 2)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), r"drop_last=True.*Expected more than 1 value"),
        (Unpooled, r"deterministic=False.*max_unpooling2d"),
    ],
)
def test_errors_of_torch_that_need_another_remedy_here_name_it(model: Callable[[], nn.Module], said: str) -> None:
    net = model()
    trainer = Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loss=lambda model, batch: model(batch[0]).mean(), num_shards=2
    )
    (batch,) = ShardedLoader(TensorDataset(torch.ones(2, 4)), batch_size=4, num_shards=2).epoch(0)
    with pytest.raises(LossError, match=said):
        trainer.step(batch)


class LazyNoise(nn.Module):
    """A layer whose generator is made when it first needs it, in another place of each kind."""

    def __init__(self, kind: str, from_step: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.from_step = kind, from_step
        self.layer = nn.Linear(4, 3)
        self.held: dict[str, Any] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        if self.place < self.from_step:
            return hidden
        if self.kind == "attribute":
            if not hasattr(self, "generator"):
                self.generator = random.Random()
            return hidden * self.generator.random()
        if self.kind == "item":
            return hidden * self.held.setdefault("generator", np.random.default_rng()).random()
        if LazyNoise.shared is None:
            LazyNoise.shared = torch.Generator()
            LazyNoise.shared.seed()
        return hidden * torch.rand((), generator=LazyNoise.shared)

    shared: torch.Generator | None = None
    place = 0


@pytest.mark.parametrize(("kind", "from_step"), [("attribute", 0), ("item", 0), ("attribute", 11)])
def test_a_generator_that_a_forward_makes_is_seeded_before_it_is_drawn_from(kind: str, from_step: int) -> None:
    # It drew from a seed of its own in the first shard of each worker, and in the first steps searches were counted by
    # calls, so that they ended earlier on a worker with more shards.
    def program(world: World) -> tuple[str, float]:
        model = LazyNoise(kind, from_step)

        def loss(model: nn.Module, batch: Any, place: Any) -> Tensor:
            net: Any = model
            net.place = place.global_step
            squares: Tensor = net(batch[0]).square()
            return squares.mean()

        data = TensorDataset(torch.randn(18, 4, generator=torch.Generator().manual_seed(1)))
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, num_shards=NUM_SHARDS, world=world
        )
        loader = ShardedLoader(data, batch_size=3, num_shards=NUM_SHARDS, world=world)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                trainer.step(batch)
        return trainer.digest(), trainer.evaluate(loader, lambda model, batch: (model(batch[0]).sum(), 1.0))[
            "metric"
        ].total

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*\(LS518\)")  # the place of this test's loss
        first, *others = [answer for size in (1, 2, 3) for answer in run_ranks(size, program)]
    assert all(other == first for other in others)


def test_a_generator_of_the_operating_system_is_named_and_left_alone() -> None:
    # Its getstate raised a NotImplementedError, without a word about where it is.
    source = random.SystemRandom()
    net = nn.Linear(4, 3)
    trainer = Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loss=lambda model, batch: model(batch[0]).mean(), num_shards=1
    )
    loader = ShardedLoader(TensorDataset(torch.ones(2, 4)), batch_size=2, num_shards=1)
    with pytest.warns(UserWarning, match=r"generator source, a SystemRandom, has no state .*\(LS518\)"):
        trainer.evaluate(loader, lambda model, batch: (model(batch[0]).sum() * source.random(), 1.0))
