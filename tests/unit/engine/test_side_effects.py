"""State that a shard leaves behind: warned of where it matters, and only there."""

import functools
import itertools
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.kept_state import PLACES
from tests.support.threaded_ranks import run_ranks
from tests.unit.engine.test_trainer import data, loader, mean_loss, model
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer
from lockstep.errors import LossError

DTYPE = torch.float64


class Layer(nn.Module):
    """Calls a function with itself and what it is given."""

    def __init__(self, call: Callable[["Layer", Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.call = call
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(self, inputs)


def average(layer: Layer, inputs: Tensor) -> Tensor:
    layer.mean = 0.9 * layer.mean + 0.1 * inputs.detach().mean(0)
    return inputs - layer.mean


def average_in_place(layer: Layer, inputs: Tensor) -> Tensor:
    layer.mean.mul_(0.9).add_(inputs.detach().mean(0))
    return inputs


def queue(layer: Layer, inputs: Tensor) -> Tensor:
    layer.seen.append(inputs.detach().mean(0))
    return inputs - torch.stack(list(layer.seen)).sum(0)


def table(layer: Layer, inputs: Tensor) -> Tensor:
    layer.counts[0] += 1
    return inputs / layer.counts[0]


def keep_activation(layer: Layer, inputs: Tensor) -> Tensor:
    layer.last = inputs.detach() * 2
    layer.history.append(inputs.mean().item())
    layer.loss = inputs.sum()
    return inputs


def cache(layer: Layer, inputs: Tensor) -> Tensor:
    if not isinstance(layer.scale, Tensor):
        layer.scale = torch.full((1,), 2.0, dtype=DTYPE)
    return inputs * layer.scale


def take_step(layer: nn.Module | None, loss: Any = mean_loss, num_shards: int = 4, num_epochs: int = 1) -> None:
    net = nn.Sequential(model(), *([] if layer is None else [layer]))
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=num_shards)
    for epoch in range(num_epochs):
        for batch in loader(num_shards).epoch(epoch):
            trainer.step(batch)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: Layer(average, mean=torch.ones(1, dtype=DTYPE)), r"1\.mean"),
        (lambda: Layer(average_in_place, mean=torch.ones(1, dtype=DTYPE)), r"1\.mean"),
        (lambda: Layer(queue, seen=deque(maxlen=3)), r"1\.seen"),
        (lambda: Layer(table, counts=np.ones(1)), r"1\.counts"),
        (lambda: Layer(table, counts=[1.0]), r"1\.counts"),
    ],
)
def test_state_in_attributes_is_warned_of_by_name(layer: Callable[[], Layer], name: str) -> None:
    with pytest.warns(UserWarning, match=f"has changed {name}, and") as warned:
        take_step(layer())
    assert len(warned) == 1


@pytest.mark.parametrize("place", PLACES)
def test_state_is_warned_of_wherever_it_is_kept(place: str) -> None:
    # 54 of these 57 were silent, and gave other digests on one worker and on two.
    layer, loss = PLACES[place]()
    with pytest.warns(UserWarning, match=r"The forward of a shard has changed .* \(LS518\)"):
        take_step(layer, loss)


@functools.lru_cache(maxsize=2)
def make_mask(length: int) -> Tensor:
    return torch.ones(length, dtype=DTYPE)


TIMES: dict[str, list[float]] = defaultdict(list)
NAMES = itertools.count()


class Trace:
    """Keeps numbers, and depends on none of them."""

    def __init__(self) -> None:
        self.num_calls, self.total = 0, torch.zeros((), dtype=DTYPE)
        self.last: dict[str, Tensor] = {}

    def hook(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.num_calls += 1
        self.total += output.detach().sum()
        self.last["output"] = output
        TIMES[f"call {next(NAMES)}"].append(time.perf_counter())


def masked(layer: Any, inputs: Tensor) -> Tensor:
    if not hasattr(layer, "mask"):
        layer.mask = make_mask(inputs.shape[1])
    masked: Tensor = inputs * layer.mask * make_mask(1)
    return masked


def test_what_hooks_caches_and_tables_of_times_keep_beside_is_no_state() -> None:
    layer, trace = Layer(masked), Trace()
    layer.register_forward_hook(trace.hook)
    take_step(layer)
    assert trace.num_calls == 12, "as if shard 0 had run once"


def test_state_that_begins_in_a_later_step_is_warned_of() -> None:
    def late(layer: Any, inputs: Tensor) -> Tensor:
        layer.call_number += 1
        if layer.call_number > 9:
            trace.mean = 0.5 * trace.mean + inputs.detach().mean()
        shifted: Tensor = inputs - trace.mean
        return shifted

    class Mean:
        mean: Any = 0.0

    trace = Mean()
    with pytest.warns(UserWarning, match="LS518") as warned:
        take_step(Layer(late, call_number=0), num_shards=2, num_epochs=3)
    assert ["mean" in str(each.message) for each in warned] == [False, True]


def test_a_counter_in_the_closure_of_a_loss_is_warned_of_by_name() -> None:
    count = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        return mean_loss(model, batch) * count

    with pytest.warns(UserWarning, match=r"has changed loss: count, and .* gets them as place"):
        take_step(None, loss)


def test_a_loss_object_that_remembers_is_warned_of_by_name() -> None:
    class Loss:
        def __init__(self) -> None:
            self.previous: Tensor | None = None

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            loss = mean_loss(model, batch)
            previous, self.previous = self.previous, loss.detach()
            return loss if previous is None else loss + previous * loss

    with pytest.warns(UserWarning, match=r"has changed Loss\.previous, and"):
        take_step(None, Loss())


class Output(dict[str, Tensor]):
    """A dictionary that refuses to be updated."""

    def update(self, *_others: Any) -> None:  # type: ignore[override]
        raise TypeError


def keep_output(layer: Any, inputs: Tensor) -> Tensor:
    layer.output = Output(hidden=inputs.detach())
    return inputs


def take_out_items(net: nn.Module, batch: Any) -> Tensor:
    targets = batch.pop()
    return nn.functional.mse_loss(net(batch[0]), targets)


def write_inputs(net: nn.Module, batch: Any) -> Tensor:
    return mean_loss(net, [batch[0].mul_(2), batch[1]])


@pytest.mark.parametrize(
    ("layer", "loss"),
    [
        (lambda: Layer(cache, scale=None), mean_loss),
        (lambda: Layer(keep_activation, last=None, history=[], loss=None), mean_loss),
        (lambda: Layer(keep_output, output=None), mean_loss),
        (lambda: Layer(keep_activation, last=None, history=[], loss=None), take_out_items),
        (lambda: Layer(keep_activation, last=None, history=[], loss=None), write_inputs),
    ],
)
def test_what_is_only_kept_to_be_looked_at_and_an_input_that_is_used_up_are_no_state(
    layer: Callable[[], Layer], loss: Any
) -> None:
    kept = layer()
    take_step(kept, loss)
    assert len(getattr(kept, "history", [0.0] * 12)) == 12, "a list is as long as if shard 0 had run once"


def test_numbers_are_as_if_shard_0_had_run_once() -> None:
    def count(layer: Any, inputs: Tensor) -> Tensor:
        layer.calls += 1
        layer.seen.append(0)
        return inputs

    kept: Any = Layer(count, calls=0, seen=[])
    with pytest.warns(UserWarning, match=r"has changed 1\.calls, and"):
        take_step(kept)
    assert kept.calls == len(kept.seen) == 12


def test_state_that_only_another_worker_changes_is_warned_of_there() -> None:
    # Only rank 0 looked. Numbers are told apart without a second forward, which could call collectives.
    def program(world: World) -> None:
        layer = Layer(average_in_place if world.rank else keep_nothing, mean=torch.ones(1, dtype=DTYPE))
        net = nn.Sequential(model(), layer)
        training = Trainer(
            net, torch.optim.SGD(net.parameters(), 0.1), loss=mean_loss, num_shards=4, world=world, deterministic=False
        )
        shards = ShardedLoader(data(16), batch_size=8, num_shards=4, seed=3, world=world)
        training.step(next(iter(shards.epoch(0))))
        training.close()

    with pytest.warns(UserWarning, match=r"has changed 1\.mean, and") as warned:
        run_ranks(2, program)
    assert len(warned) == 1


def keep_nothing(_layer: Layer, inputs: Tensor) -> Tensor:
    return inputs


# -- `Trainer.verify`: what depends on who runs which shard is named, and everything is as it was ----------------------


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
