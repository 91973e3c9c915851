"""A training on an asynchronous device whose workers kill themselves at given moments."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.asynchronous_device import asynchronous_device
from tests.support.device_modes import Transfers
from tests.support.fake_device import DEVICE, FakeDevice
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.engine.step_table import StepTable


def show_devices_to_groups(device: FakeDevice | None) -> None:
    """Let groups see where tensors are: torch calls them from C++, where a function mode is off (for this process)."""
    if device is None:
        return
    make_call = ShmProcessGroup.make_call

    def make_call_with_devices(self: ShmProcessGroup, *arguments: Any) -> Any:
        with Transfers(device):
            return make_call(self, *arguments)

    ShmProcessGroup.make_call = make_call_with_devices  # type: ignore[method-assign,assignment]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 50
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def train(run: ls.Run, backend: str, kills: dict[str, int], joins: Path | None = None) -> Any:
    """Train on this worker's device; return the digest, and the losses and metrics that this worker has seen.

    Args:
        run: The worker.
        backend: What carries the tensors of the device: that of CUDA if there is one, else one that is not there.
        kills: At which moment a worker of a rank kills itself: "rank moment", and the number of the moment.
        joins: The last worker waits until a new one has made this file.
    """
    cuda = torch.device("cuda", 0) if torch.cuda.is_available() else None
    dist.Backend.default_device_backend_map[(cuda or DEVICE).type] = backend
    rank, counts = run.rank, dict.fromkeys(("loss", "update", "metric"), 0)

    def reach(moment: str) -> None:
        counts[moment] += 1
        if kills.get(f"{rank} {moment}") == counts[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(model: nn.Module, batch: list[Tensor]) -> ls.Mean:
        reach("loss")
        if joins is not None and run.world_size == 1:
            wait_for(joins)
        weight = (batch[0][:, 0] > -10).sum()  # a tensor on the device
        return ls.Mean(nn.functional.mse_loss(model(batch[0]), batch[1]) * weight, weight)

    def metric(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        reach("metric")
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            reach("update")
            return result

    exchange = StepTable.exchange

    def exchange_when_all_is_here(table: StepTable, numbers: list[float]) -> Sequence[float]:
        stream = torch.accelerator.current_stream()
        assert stream.query(), "the host runs ahead of the device when it exchanges the step table"
        return exchange(table, numbers)

    StepTable.exchange = exchange_when_all_is_here  # type: ignore[method-assign,assignment]  # the process ends with the run
    torch.manual_seed(0)
    with nullcontext() if cuda else asynchronous_device() as fake:
        device = cuda or DEVICE
        show_devices_to_groups(fake)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)).to(device)
        trainer = ls.Trainer(
            model,
            Optimizer(model.parameters(), 0.01, fused=True),
            loss=loss,
            num_shards=6,
            deterministic=False,
            on_worker_loss="continue",
        )
        inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = ls.ShardedLoader(data, batch_size=12, num_shards=6)
        found: list[float] = []
        if joins is not None and run.is_new:
            joins.touch()
        trainer.join()
        for epoch in range(trainer.cursor.epoch, 2):
            found += [trainer.step(batch).loss for batch in loader.epoch(epoch, trainer.cursor.step)]
            found.append(trainer.evaluate(loader, metric)["metric"].value)
        return trainer.digest(), found
