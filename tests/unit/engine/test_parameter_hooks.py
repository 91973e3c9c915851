"""Hooks on parameters, and networks that only the loss uses: as in a plain loop, or said."""

from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from tests.unit.engine.test_trainer import data, loader, mean_loss, model, trainer
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.data import ShardedLoader
from lockstep.engine import Trainer, parameters
from lockstep.errors import LossError
from lockstep.reduce.tensor_bits import sum_of_bits

ALONE = World(rank=0, world_size=1, group=None)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def add_hooks(net: nn.Module, steps: list[Tensor]) -> None:
    first, last = net[0].weight, net[3].weight
    first.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    last.register_hook(lambda gradient: steps.append(gradient.clone()))
    last.register_post_accumulate_grad_hook(halve)


def train(world: World) -> tuple[str, int]:
    net = model()
    seen: list[Tensor] = []
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=4, world=world)
    add_hooks(net, seen)
    for batch in ShardedLoader(data(), batch_size=8, num_shards=4, seed=3, world=world).epoch(0):
        trainer.step(batch)
    return trainer.digest(), len(seen)


def test_hooks_on_parameters_are_given_what_a_plain_loop_would_give_them() -> None:
    ours, plain = model(), model()
    seen: list[Tensor] = []
    expected: list[Tensor] = []
    trainer = Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss=mean_loss, num_shards=4, max_grad_norm=0.2)
    add_hooks(ours, seen)
    add_hooks(plain, expected)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in ShardedLoader(data(), batch_size=8, num_shards=4, seed=3).epoch(0):
        trainer.step(batch)
        optimizer.zero_grad()
        mean_loss(plain, [torch.cat([part.data[side] for part in batch.slices]) for side in (0, 1)]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        optimizer.step()
    torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-12)
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    mean_loss(ours, data()[:]).backward()
    assert len(seen) == len(expected) + 1, "between two steps a backward is the user's own"


def test_hooks_on_parameters_give_the_same_bits_on_any_number_of_workers() -> None:
    expected = train(ALONE)
    assert expected[1] == 3
    for workers in (2, 3):
        assert run_ranks(workers, train) == [expected] * workers


def test_a_scaler_leaves_out_a_step_that_overflows_where_there_are_hooks() -> None:
    # It was an error: the scaled gradient was looked at, as the hooks might have changed it.
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=4, scaler=scaler)
    net[0].weight.register_hook(lambda gradient: gradient * float("inf") if scaler.get_scale() > 2.0**99 else None)
    before = trainer.digest()
    first, second, *_ = ShardedLoader(data(), batch_size=8, num_shards=4, seed=3).epoch(0)
    trainer.step(first)
    assert trainer.digest() == before
    trainer.step(second)
    assert trainer.digest() != before


def distill(world: World, *, seed: int = 7, writes: bool = False, is_frozen: bool = True) -> tuple[str, Tensor]:
    net = model()
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    teacher.requires_grad_(not is_frozen)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        if writes:
            with torch.no_grad():
                teacher[0].weight.mul_(0.9)
        return (net(batch[0]) - teacher(batch[0])).square().mean()

    trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, num_shards=4, world=world)
    for batch in ShardedLoader(data(24), batch_size=8, num_shards=4, seed=3, world=world).epoch(0):
        trainer.step(batch)
    return trainer.digest(), dict(teacher.named_buffers())["1.running_mean"]


def test_a_loss_that_writes_parameters_of_another_network_is_refused_by_name() -> None:
    def program(world: World) -> str:
        with pytest.raises(LossError) as failure:
            distill(world, writes=True)
        return str(failure.value)

    for text in run_ranks(2, program):
        assert "Parameter teacher.0.weight was written" in text


def test_a_network_that_differs_between_workers_is_refused_by_name() -> None:
    def program(world: World) -> str:
        with pytest.raises(ValueError, match="different arguments") as failure:
            distill(world, seed=world.rank)
        return str(failure.value)

    assert all("the network teacher that the loss uses is" in text for text in run_ranks(2, program))


def test_a_network_with_gradients_that_nothing_trains_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"gives teacher\.0\.weight and 5 more of its parameters gradients"):
        distill(ALONE, is_frozen=False)


def test_hooks_on_one_worker_alone_are_an_error_on_all() -> None:
    def program(world: World) -> str:
        net = model()
        trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=4, world=world)
        if world.rank == 1:
            net[0].bias.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(ValueError, match="hooks on parameter") as failure:
            trainer.step(next(iter(ShardedLoader(data(), batch_size=8, num_shards=4, world=world).epoch(0))))
        return str(failure.value)

    for text in run_ranks(2, program):
        assert "hooks on parameter 0.bias give another gradient on rank 1 than on rank 0" in text


def test_hooks_that_only_look_may_be_on_one_worker() -> None:
    seen: list[Tensor] = []

    def program(world: World) -> str:
        net = model()
        trainer = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=4, world=world)
        if world.rank == 1:
            net[0].bias.register_hook(lambda gradient: seen.append(gradient.norm()))
            net[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
        trainer.step(next(iter(ShardedLoader(data(), batch_size=8, num_shards=4, world=world).epoch(0))))
        return trainer.digest()

    assert len(set(run_ranks(2, program))) == 1
    assert len(seen) == 2


# -- Parameters that a forward writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # An exclusive or of all elements is 0 before and after: a bias that went from zeros to ones was not found.
        (torch.zeros(6), torch.ones(6)),
        (torch.zeros(3, dtype=torch.complex64), torch.tensor([1j, 0, 0])),
        (torch.zeros(2, 2).t(), torch.eye(2)),
    ],
)
def test_a_write_through_data_is_found(before: Tensor, after: Tensor) -> None:
    net = model()
    net.extend([nn.ParameterList([torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16), before]).requires_grad_(False)])
    written = net[4][2]

    def loss(net: Any, batch: Any) -> Tensor:
        written.data.copy_(after)
        return mean_loss(net[:4], batch)

    training = trainer(net, loss=loss)
    batch = next(iter(loader().epoch(0)))
    with pytest.raises(LossError, match=r"Parameter 4\.2 was written on rank 0"):
        training.step(batch)


def test_workers_that_change_do_not_read_all_parameters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three steps after each loss or join took longer by the reading of all parameters, twice in each.
    training = trainer(model())
    batches = (batch for epoch in range(3) for batch in loader().epoch(epoch))
    for _ in range(3):
        training.step(next(batches))
    num_read: list[None] = []

    def read(tensors: list[Tensor]) -> Tensor:
        num_read.append(None)
        return sum_of_bits(tensors)

    monkeypatch.setattr(parameters, "sum_of_bits", read)
    training.internals._replace_engine(training.internals.world, None)  # as with other workers
    training.step(next(batches))
    assert not num_read
    training.internals._replace_engine(training.internals.world, [])  # as after parameters were unfrozen
    training.step(next(batches))
    assert num_read
