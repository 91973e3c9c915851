"""What a run finds out about itself in its first steps, by computing shards once more elsewhere."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.comm import World

ALONE = World(rank=0, world_size=1, group=None)
NUM_SHARDS = 4


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def pairs() -> TensorDataset:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(
    world: World,
    make_loss: Callable[[World, torch.optim.Optimizer], Any] = lambda _world, _optimizer: squared,
    make_data: Callable[[], Dataset[Any]] = pairs,
    verify_steps: int = 3,
) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = make_loss(world, optimizer)
    trainer = ls.Trainer(
        model, optimizer, loss=loss, num_shards=NUM_SHARDS, world=world, verify_steps=verify_steps, max_grad_norm=1.0
    )
    loader = trainer.loader(make_data(), batch_size=16)
    for batch in loader.epoch(0):
        trainer.step(batch)
    return trainer.digest()


def run(workers: int, program: Callable[[World], Any]) -> list[Any]:
    return [program(ALONE)] if workers == 1 else run_ranks(workers, program)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_no_bit_of_a_training_that_is_right_is_another_one_for_it(workers: int) -> None:
    assert run(workers, train) == [train(ALONE, verify_steps=0)] * workers


def ask_for_the_rank(world: World, _optimizer: torch.optim.Optimizer) -> Any:
    return lambda model, batch: squared(model, batch) * (1 + world.rank)


def step_a_scheduler(_world: World, optimizer: torch.optim.Optimizer) -> Any:
    groups = optimizer.param_groups

    def loss(model: nn.Module, batch: Any) -> Tensor:
        groups[0]["lr"] *= 0.9
        return squared(model, batch)

    return loss


class Remembering(Dataset[Any]):
    """Gives other values of a sample each time, which the loss scarcely sees."""

    def __init__(self) -> None:
        self._inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        sample = self._inputs[index]
        sample *= 1.25
        return sample.clone(), sample.sum().view(1)


class Keeping(Dataset[Any]):
    """Augments each sample once, and keeps that; or draws anew each time."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = self._kept.get(index, torch.randn(3))
        if self._keeps:
            self._kept[index] = noise
        return noise, noise.sum().view(1)


def test_a_data_set_that_keeps_what_it_has_drawn_is_told() -> None:
    # The first epoch had equal bits, and the second one others.
    run(2, partial(train, make_data=partial(Keeping, keeps=False)))
    with pytest.warns(UserWarning, match="when they are loaded again by rank 1: it remembers something"):
        run(2, partial(train, make_data=partial(Keeping, keeps=True)))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_loss_that_depends_on_the_rank_is_told(workers: int) -> None:
    with pytest.warns(
        UserWarning, match=r"the loss and 6 more have other bits in shard \d on rank \d than on rank 0.*LS518"
    ):
        run(workers, partial(train, make_loss=ask_for_the_rank))


def test_samples_that_are_others_when_they_are_loaded_again_are_told() -> None:
    with pytest.warns(
        UserWarning,
        match="gives other data for the samples of shard 0 of rank 0 when they are loaded again: it remembers",
    ):
        train(ALONE, make_data=Remembering)


def test_a_loss_that_changes_the_learning_rate_is_told() -> None:
    with pytest.warns(UserWarning, match="has changed the options of the optimizer"):
        train(ALONE, step_a_scheduler)


def count_calls(path: Path, verify_steps: int) -> int:
    def make_loss(_world: World, _optimizer: torch.optim.Optimizer) -> Any:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            with path.open("a", encoding="ascii") as file:  # what an object keeps is put back
                file.write(".")
            return squared(model, batch)

        return loss

    path.write_text("")
    train(ALONE, make_loss, verify_steps=verify_steps)
    return path.stat().st_size


def test_it_costs_nothing_after_the_first_steps(tmp_path: Path) -> None:
    none, one, three, all_but_first = (count_calls(tmp_path / "calls", number) for number in (0, 1, 3, 100))
    assert one - none == 3
    assert three - none == 9
    assert three == all_but_first  # of four steps


def test_a_loss_that_cannot_be_called_again_is_left_alone() -> None:
    def make_loss(_world: World, _optimizer: torch.optim.Optimizer) -> Any:
        batches = iter(torch.utils.data.DataLoader(torch.zeros(100, 1)))
        return lambda model, batch: squared(model, batch) + next(batches).sum()

    with pytest.warns(UserWarning, match="has changed"):  # by the first step, which names it
        train(ALONE, make_loss)


def test_a_number_of_steps_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="verify_steps is -1, expected 0"):
        train(ALONE, verify_steps=-1)
