"""Small gradients of the last bucket are noted without Python code, and nothing that a function would see is missed."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from tests.unit.reduce.reducers import gradients, reducer_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm import World
from lockstep.reduce import Reducer, slot

NUM_LAYERS = 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(NUM_LAYERS)))


def rows_of(world: World) -> Tensor:
    return torch.ones(2, 3) + world.rank


def train(reducer: Reducer, model: nn.Module, world: World, run: Any = None) -> None:
    model.zero_grad()
    reducer.finish_interrupted()
    output = (run or model)(rows_of(world))
    reducer.mark(output)
    output.sum().backward()


def same_on_all(found: list[list[Tensor]]) -> bool:
    first, *others = found
    return bool(first) and all(
        torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True)
    )


def count_deliveries(reducer: Reducer, model: nn.Module, world: World) -> int:
    found = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code is slot._deliver_to_slot.__code__

    sys.setprofile(look)
    try:
        train(reducer, model, world)
    finally:
        sys.setprofile(None)
    return found


def test_after_the_first_steps_one_gradient_of_a_backward_runs_python_code() -> None:
    def program(world: World) -> list[int]:
        model = net()
        reducer = reducer_of(model, world)
        return [count_deliveries(reducer, model, world) for _ in range(4)]

    for numbers in run_ranks(2, program):
        assert numbers[0] == 2 * NUM_LAYERS
        assert numbers[2:] == [1, 1], "every step pays for a Python function for each small gradient"


def test_after_a_failed_backward_one_that_begins_at_no_output_is_reduced() -> None:
    # The hooks noted gradients only, in a list, when the error came. Nobody would see a backward of a penalty then.
    def program(world: World) -> list[Tensor]:
        model = net()
        reducer = reducer_of(model, world)
        for _ in range(3):
            train(reducer, model, world)

        def fail(_gradient: Tensor) -> None:
            raise ZeroDivisionError

        def run(rows: Tensor) -> Tensor:
            middle: Tensor = model[:5](rows)
            middle.register_hook(fail)
            output: Tensor = model[5:](middle)
            return output

        with pytest.raises(ZeroDivisionError):
            train(reducer, model, world, run)
        model.zero_grad()
        (model[-1].weight.sum() * (1 + world.rank)).backward()
        return gradients(model)

    found = run_ranks(2, program)
    assert same_on_all(found)
    assert torch.equal(found[0][-1], torch.full((3, 3), 1.5))


def test_a_checkpoint_that_is_used_after_the_first_steps_gives_the_mean() -> None:
    def program(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model = net()
        reducer = reducer_of(model, world)

        def run_again(rows: Tensor) -> Tensor:
            output: Tensor = model[1:](checkpoint(model[:2], model[0](rows), use_reentrant=True))
            return output

        for _ in range(3):
            train(reducer, model, world)
        train(reducer, model, world, run_again)
        mean = gradients(model)
        alone = net()
        own = [torch.zeros_like(each) for each in alone.parameters()]
        for rank in range(2):
            alone.zero_grad()
            rows = torch.ones(2, 3) + rank
            alone[1:](alone[:2](alone[0](rows))).sum().backward()
            own = [total + each / 2 for total, each in zip(own, gradients(alone), strict=True)]
        return mean, own

    for mean, expected in run_ranks(2, program):
        for one, other in zip(mean, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_an_unused_parameter_is_none_among_noted_ones() -> None:
    def program(world: World) -> tuple[bool, list[Tensor]]:
        model = net()
        reducer = reducer_of(model, world)
        for _ in range(3):
            train(reducer, model, world)
        train(reducer, model, world, model[:-1])
        return model[-1].weight.grad is None, gradients(model)

    found = run_ranks(2, program)
    assert all(is_none for is_none, _ in found)
    assert same_on_all([each for _, each in found])
    assert len(found[0][1]) == 2 * NUM_LAYERS - 2
