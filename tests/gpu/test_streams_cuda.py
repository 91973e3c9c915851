"""Models that compute on several streams: nobody reads a gradient before it is there. Skips itself without a GPU."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from tests.gpu.sharing import DEVICE, delay, join_over_gloo, on_one_gpu
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUM_STEPS = 3
BATCH = 8


class Late(torch.autograd.Function):
    """Hands values on after a while, forward and backward, on the stream on which it is called."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        delay(10)
        return values * 1

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        delay(10)
        return gradient * 1


def late(values: Tensor) -> Tensor:
    return Late.apply(values)  # type: ignore[no-untyped-call]


class Branches(nn.Module):
    """Two branches, one of which may run on a stream of its own."""

    def __init__(self, *, has_side: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.side = torch.cuda.Stream() if has_side and DEVICE.type == "cuda" else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.side is None:
            right = late(self.right(late(inputs)).tanh())
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                inputs.record_stream(self.side)
                right = late(self.right(late(inputs)).tanh())
        left = late(self.left(late(inputs)).tanh())
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            right.record_stream(torch.cuda.current_stream())
        return self.last(left + right)


def make_model(*, has_side: bool) -> Branches:
    return Branches(has_side=has_side).to(DEVICE)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def train_plain(world_size: int) -> list[list[float]]:
    """Train on the batches of all ranks, on one stream."""
    model = make_model(has_side=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (mean_loss(model, [batch_of(rank, step).to(DEVICE)]) / world_size).backward()
        optimizer.step()
    return values_of(model)


def values_of(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def train_wrapped(run: ls.Run, *, calls_on_side: bool) -> list[list[float]]:
    wrapped = ls.DistributedDataParallel(make_model(has_side=True))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    side = torch.cuda.Stream() if calls_on_side and DEVICE.type == "cuda" else None
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = mean_loss(wrapped, [batch_of(run.rank, step).to(DEVICE)])
        if side is None:
            loss.backward()
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss.backward()
            torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
    return values_of(wrapped)


def train_trainer(run: ls.Run) -> list[list[float]]:
    model = make_model(has_side=True)
    batches = [batch_of(rank, step) for step in range(NUM_STEPS) for rank in range(run.world_size)]
    loader = ls.ShardedLoader(
        TensorDataset(torch.cat(batches)),
        batch_size=BATCH * run.world_size,
        num_shards=run.world_size,
        shuffle=False,
    )
    trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, num_shards=run.world_size)
    for batch in loader.epoch(0):
        trainer.step(batch)
    return values_of(model)


def train_all(run: ls.Run) -> dict[str, list[list[float]]]:
    join_over_gloo(run)
    return {
        "plain": train_plain(run.world_size),
        "DDP": train_wrapped(run, calls_on_side=False),
        "DDP, backward on a side stream": train_wrapped(run, calls_on_side=True),
        "trainer": train_trainer(run),
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, list[list[float]]]]:
    return ls.launch(train_all, devices=on_one_gpu(2))


@pytest.mark.parametrize("side", ["DDP", "DDP, backward on a side stream", "trainer"])
def test_gradients_of_a_side_stream_are_waited_for(answers: list[dict[str, Any]], side: str) -> None:
    for found in answers:
        for mine, right in zip(found[side], found["plain"], strict=True):
            assert mine == pytest.approx(right, rel=1e-4, abs=1e-6)


def test_a_trainer_on_a_stream_of_its_own_has_the_bits_of_one_on_the_default_stream() -> None:
    def work(_run: ls.Run) -> list[str]:
        digests = []
        for has_stream in (False, True):
            model = copy.deepcopy(make_model(has_side=False))
            trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_loss, num_shards=2)
            loader = ls.ShardedLoader(
                TensorDataset(torch.cat([batch_of(0, step) for step in range(3)])), batch_size=BATCH, num_shards=2
            )
            stream = torch.cuda.Stream() if has_stream and DEVICE.type == "cuda" else None
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                for batch in loader.epoch(0):
                    trainer.step(batch)
            if stream is not None:
                stream.synchronize()
            digests.append(trainer.digest())
        return digests

    [digests] = ls.launch(work, devices=on_one_gpu(1))
    assert digests[0] == digests[1]
