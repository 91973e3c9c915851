"""A worker that fails on the GPU: both workers end in time, and the first is named. Skips itself without a GPU."""

import time
from typing import Any

import pytest
import torch
from tests.gpu.sharing import DEVICE, join_over_gloo, on_one_gpu
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAILING_RANK, FAILING_STEP = 1, 2
BOUND_SECONDS = 45.0
"""With the start of the workers."""
CAUSES = {"exception": "planted", "out of memory": "out of memory", "assert": "device-side assert"}


def fill_memory() -> Tensor:
    torch.cuda.set_per_process_memory_fraction(0.02)
    held, size = [], 2**28
    while True:
        try:
            held.append(torch.ones(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            if size <= 512:
                raise
            size //= 2


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return values * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.kind == "exception":
            raise RuntimeError("planted")
        if ctx.kind == "out of memory":
            return gradient + fill_memory(), None
        table = torch.ones(4, device=DEVICE)
        return gradient + table[torch.full((1,), 1000, device=DEVICE)], None


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.back = nn.Linear(64, 64), nn.Linear(64, 1)
        self.kind, self.is_due = kind, False

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.front(values)
        if self.is_due:
            hidden = Fault.apply(hidden, self.kind)  # type: ignore[no-untyped-call]
        return self.back(hidden)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def train_trainer(run: ls.Run, kind: str) -> None:
    join_over_gloo(run)
    net = Net(kind).to(DEVICE)
    trainer = ls.Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_loss, num_shards=4)
    loader = ls.ShardedLoader(TensorDataset(torch.randn(80, 64)), batch_size=16, num_shards=4)
    for step, batch in enumerate(loader.epoch(0)):
        net.is_due = (run.rank, step) == (FAILING_RANK, FAILING_STEP)
        trainer.step(batch)


def train_wrapped(run: ls.Run, kind: str) -> None:
    join_over_gloo(run)
    net = Net(kind).to(DEVICE)
    wrapped = ls.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        net.is_due = (run.rank, step) == (FAILING_RANK, FAILING_STEP)
        optimizer.zero_grad()
        mean_loss(wrapped, [torch.randn(8, 64, device=DEVICE)]).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", list(CAUSES))
@pytest.mark.parametrize("train", [train_trainer, train_wrapped])
def test_a_failure_in_a_backward_on_the_gpu_ends_both_workers(train: Any, kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(ls.WorkerFailedError) as caught:
        ls.launch(train, kind, devices=on_one_gpu(2))
    assert time.monotonic() < began + BOUND_SECONDS
    assert caught.value.failures[0].rank == FAILING_RANK
    assert CAUSES[kind] in caught.value.failures[0].reason.lower()
