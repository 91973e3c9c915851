"""What a run finds out about itself in its first steps, by computing shards once more elsewhere."""

import functools
import os
import time
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


def scale_by_number_of_ranks(_world: World, _optimizer: torch.optim.Optimizer) -> Any:
    return lambda model, batch: squared(model, batch) / int(os.environ.get("WORLD_SIZE", "1"))


def stop_after_many_calls(_world: World, _optimizer: torch.optim.Optimizer) -> Any:
    counts = {"calls": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        counts["calls"] += 1
        return squared(model, batch) * (1.0 if counts["calls"] < 1000 else 0.5)

    return loss


def test_a_loss_that_depends_on_the_number_of_ranks_is_told_of_a_worker_alone_too() -> None:
    with pytest.warns(UserWarning, match=r"in a process with another rank or number of ranks\. Keep.*LS518"):
        train(ALONE, scale_by_number_of_ranks)
    assert "WORLD_SIZE" not in os.environ


def test_a_counter_that_matters_after_many_shards_is_told_in_the_first_ones() -> None:
    with pytest.warns(UserWarning, match="another result after many shards, by what loss: counts has counted"):
        train(ALONE, stop_after_many_calls)


def noisy_by_time(inputs: Tensor) -> Tensor:
    return inputs + torch.randn(3, generator=torch.Generator().manual_seed(int(time.time()) // 1000))


@pytest.mark.parametrize("kind", ["data set", "stream"])
def test_samples_that_depend_on_the_time_are_told(kind: str) -> None:
    rows = [pairs()[number] for number in range(64)]

    def transform(number: int) -> Any:
        inputs, target = rows[number]
        return noisy_by_time(inputs), target

    class Augmented(Dataset[Any]):
        __getitem__ = staticmethod(transform)

        def __len__(self) -> int:
            return 64

    data = Augmented() if kind == "data set" else ls.Stream(range(64), transform=transform)
    with pytest.warns(UserWarning, match="in a process with another time"):
        train(ALONE, make_data=lambda: data)


def test_a_stream_whose_function_keeps_what_it_has_drawn_is_told() -> None:
    def make() -> Dataset[Any]:
        @functools.cache
        def transform(number: int) -> Any:
            noise = torch.randn(3) + number
            return noise, noise.sum().view(1)

        return ls.Stream(range(64), transform=transform)

    with pytest.warns(UserWarning, match="when they are loaded again by rank 1"):
        run(2, partial(train, make_data=make))


def test_what_a_table_was_made_with_is_no_dependence(recwarn: pytest.WarningsRecorder) -> None:
    def make_loss(_world: World, _optimizer: torch.optim.Optimizer) -> Any:
        made: dict[str, Any] = {"losses": [], "seconds": 0.0}

        def loss(model: nn.Module, batch: Any) -> Tensor:
            begin = time.time()
            made.setdefault("table", (os.getpid(), torch.ones(1)))
            made.setdefault("since", begin)
            found = squared(model, batch) * made["table"][1]
            made["losses"].append(found.item())
            made["seconds"] += time.time() - begin
            return found.sum()

        return loss

    assert run(2, partial(train, make_loss=make_loss)) == [train(ALONE, verify_steps=0)] * 2
    assert not recwarn.list


def evaluate(world: World, metric: Any, times: int = 1) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = ls.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=squared, num_shards=NUM_SHARDS, world=world
    )
    loader = trainer.loader(pairs(), batch_size=16)
    return [trainer.evaluate(loader, metric)["metric"].value for _ in range(times)]


def lowest_so_far() -> Any:
    kept = [1e9]

    def metric(model: nn.Module, batch: Any) -> Any:
        kept[0] = min(kept[0], squared(model, batch).item())
        return kept[0] * len(batch[0]), len(batch[0])

    return metric


def relative_to_the_first() -> Any:
    kept: list[float] = []

    def metric(model: nn.Module, batch: Any) -> Any:
        found = squared(model, batch).item()
        kept.append(found)
        return found / kept[0] * len(batch[0]), len(batch[0])

    return metric


def by_process() -> Any:
    return lambda model, batch: (squared(model, batch).item() * os.getpid(), len(batch[0]))


@pytest.mark.parametrize(
    ("make", "workers", "problem"),
    [
        (lowest_so_far, 1, "has another value after others, by what metric: kept keeps"),
        (relative_to_the_first, 1, "has another value after others, by what metric: kept keeps"),
        (relative_to_the_first, 3, "has another value after others, by what metric: kept keeps"),
        (by_process, 1, "has another result in a process with another process id"),
    ],
)
def test_a_metric_that_remembers_is_told_once(make: Callable[[], Any], workers: int, problem: str) -> None:
    with pytest.warns(UserWarning, match=rf"The evaluation depends on who .*{problem}.*LS518") as told:
        run(workers, lambda world: evaluate(world, make(), times=3))
    assert len(told) == 1


def test_what_a_metric_shows_has_each_slice_once() -> None:
    def look(world: World) -> tuple[list[float], int]:
        shown: list[float] = []

        def metric(model: nn.Module, batch: Any) -> Any:
            shown.append(squared(model, batch).item())
            return shown[-1] * len(batch[0]), len(batch[0])

        return evaluate(world, metric), len(shown)

    assert [number for _, number in run(2, look)] == [8, 8]  # of four shards in four steps
    assert look(ALONE)[0] == look(ALONE)[0] == run(2, look)[0][0]


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
    assert one - none == 4
    assert three - none == 12
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
