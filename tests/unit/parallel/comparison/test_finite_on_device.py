"""Gradients that are not finite on an asynchronous device: told by rank, parameter and step, without a wait for it."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World

NUM_STEPS = 7
STEADY_STEP = 4
BAD_STEP = 4


class Loop:
    """A training loop on one rank of a device; in step `BAD_STEP` a gradient of rank 1 is not finite."""

    def __init__(self, world: World, device: Any, *, fused: bool, has_bad_step: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank = world.rank
        self.device = device
        self.module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device.name)
        self.model: Any = ls.DistributedDataParallel(self.module, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01, fused=fused)
        self.bad_step = BAD_STEP if has_bad_step and world.rank == 1 else -1

    def take(self, step: int, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(rows).square().mean()
        if step == self.bad_step:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        loss.backward()
        self.optimizer.step()

    def inputs(self) -> list[Tensor]:
        made = torch.randn(NUM_STEPS, 4, 4, generator=torch.Generator().manual_seed(self.rank))
        return [rows.pin_memory().to(self.device.name, non_blocking=True) for rows in made]

    def values(self) -> list[Tensor]:
        return [each.detach().cpu() for each in self.module.parameters()]


def train(world: World, *, no_waits_from: int = NUM_STEPS, **options: Any) -> tuple[str, list[Tensor]]:
    """Train; return the error of the first step that failed, and the parameters then."""
    with asynchronous_device() as device:
        loop = Loop(world, device, **options)
        try:
            for step, rows in enumerate(loop.inputs()):
                with device.no_blocking_reads() if step >= no_waits_from else nullcontext():
                    loop.take(step, rows)
        except ls.LossError as error:
            return f"{step}: {error}", loop.values()
        finally:
            loop.model._sync.close()
        return "", loop.values()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("has_bad_step", [True, False])
def test_it_is_an_error_of_the_next_step_without_a_wait_for_the_device(*, fused: bool, has_bad_step: bool) -> None:
    found = run_ranks(
        2,
        lambda world: train(world, fused=fused, has_bad_step=has_bad_step, no_waits_from=STEADY_STEP),
        has_default_group=True,
    )
    for said, values in found:
        if not has_bad_step:
            assert said == ""
            continue
        assert said.startswith(f"{BAD_STEP + 1}: In backward {BAD_STEP + 1} the gradient of ")
        assert "on rank 1" in said
        assert "rank 0" not in said
        assert ("changed nothing" if fused else "load a checkpoint") in said
        assert all(bool(value.isfinite().all()) for value in values) == fused


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_is_left_out_and_named(caplog: pytest.LogCaptureFixture, *, fused: bool) -> None:
    options = {"fused": fused, "nonfinite": "skip", "no_waits_from": STEADY_STEP if fused else NUM_STEPS}
    with caplog.at_level(logging.WARNING, "lockstep"):
        found = run_ranks(2, lambda world: train(world, **options), has_default_group=True)
    for said, values in found:
        assert said == ""
        assert all(bool(value.isfinite().all()) for value in values)
    assert [record.getMessage() for record in caplog.records if "nothing" in record.getMessage()]
    assert any("on rank 1" in record.getMessage() for record in caplog.records) or not fused
