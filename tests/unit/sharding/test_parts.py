"""Pieces of an optimizer's state move between ranks, here threads, and are those of the whole optimizer."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn, optim

from lockstep.comm import World
from lockstep.errors import CheckpointError
from lockstep.sharding.parts import OptimizerParts

SIZES = ((700, 3), (5,), (1000,), (), (400, 300))


class Run:
    """An optimizer of one rank, and the whole one beside it, which is stepped alike."""

    def __init__(self, world: World, kind: Any, neighbours: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
        self.whole = copy.deepcopy(self.parameters)
        self.generator, self.world = generator, world
        self.optimizer, self.expected = kind(self.parameters), kind(self.whole)
        self.parts = OptimizerParts(self.optimizer, world, neighbours)

    def step(self) -> None:
        for mine, whole in zip(self.parameters, self.whole, strict=True):
            mine.grad = torch.randn(mine.shape, generator=self.generator)
            whole.grad = mine.grad.clone()
        with self.parts.entered():
            self.optimizer.step()
        self.expected.step()
        self.parts.gather(self.world)

    def check(self, targets: Sequence[int]) -> None:
        for mine, whole in zip(self.parameters, self.whole, strict=True):
            assert torch.equal(mine, whole)
        self.parts.collect(self.world, targets)
        if self.world.rank in targets:
            found, expected = self.optimizer.state_dict(), self.expected.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            assert found["state"].keys() == expected["state"].keys()
            for number, values in expected["state"].items():
                for name, value in values.items():
                    other = found["state"][number][name]
                    assert torch.equal(value, other) if isinstance(value, Tensor) else value == other
        self.parts.drop()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adafactor, optim.Adagrad])
@pytest.mark.parametrize("neighbours", [0, 1])
def test_workers_that_leave_hand_over_what_they_hold(kind: Any, neighbours: int) -> None:
    def program(world: World) -> int:
        run = Run(world, kind, neighbours)
        run.step()
        run.parts.settle(world, staying=[1, 3])
        held = run.parts.num_bytes
        run.check(targets=[0, 1])
        run.parts.settle(world)  # the change was given up
        run.step()
        run.check(targets=[2])
        return held

    held = run_ranks(4, program)
    assert held[0] == held[2] == 0
    assert min(held[1], held[3]) > 0


def test_a_worker_that_holds_nothing_gets_its_pieces_and_parameters() -> None:
    def program(world: World) -> None:
        run = Run(world, optim.AdamW, neighbours=1)
        run.step()
        run.step()
        if world.rank == 1:  # as one that joins: it has the parameters of a worker that lacks some
            run.parts.forget()
            for parameter in run.parameters:
                parameter.data.zero_()
        run.parts.is_complete = world.rank == 1
        run.parts.settle(world)
        run.step()
        run.check(targets=range(3))

    run_ranks(3, program)


def test_a_piece_that_no_rank_has_is_an_error_on_all_of_them() -> None:
    def program(world: World) -> None:
        run = Run(world, optim.AdamW, neighbours=0)
        run.step()
        if world.rank == 1:
            run.parts.forget()
        with pytest.raises(CheckpointError, match="newest checkpoint"):
            run.parts.settle(world)

    run_ranks(3, program)


def test_what_is_kept_is_put_back() -> None:
    run = Run(World(rank=0, world_size=1, group=None), optim.AdamW, neighbours=0)
    run.step()
    put_back, saved = run.parts.keep(is_stepped=True), copy.deepcopy(run.optimizer.state_dict())
    run.step()
    run.optimizer.load_state_dict(run.expected.state_dict())
    put_back()
    assert str(run.optimizer.state_dict()) == str(saved)


def test_an_optimizer_is_shared_once() -> None:
    world = World(rank=0, world_size=1, group=None)
    run = Run(world, optim.AdamW, neighbours=0)
    with pytest.raises(ValueError, match="another trainer with shard_optimizer"):
        OptimizerParts(run.optimizer, world, 0)
