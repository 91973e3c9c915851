"""Workers that train on an asynchronous device are killed; the others continue, with the bits of the undisturbed run.

The device is one that computes on the CPU and queues its work all the same; Gloo carries its tensors, as NCCL would.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.asynchronous_device import asynchronous_device
from tests.support.fake_device import DEVICE
from torch import Tensor, nn

import lockstep as ls
from lockstep.engine.step_table import StepSums, StepTable

pytestmark = pytest.mark.usefixtures("warm_workers")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 50
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def train(run: ls.Run, kills: dict[str, int], joins: Path | None = None) -> Any:
    dist.Backend.default_device_backend_map[DEVICE.type] = "gloo"
    rank, counts = run.rank, dict.fromkeys(("loss", "update", "metric"), 0)

    def reach(moment: str) -> None:
        counts[moment] += 1
        if kills.get(f"{rank} {moment}") == counts[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        reach("loss")
        if joins is not None and run.world_size == 1:
            wait_for(joins)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def metric(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        reach("metric")
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            reach("update")
            return result

    exchange = StepTable.exchange

    def exchange_when_all_is_here(table: StepTable) -> StepSums:
        assert device.stream.query(), "the host runs ahead of the device when it exchanges the step table"
        return exchange(table)

    StepTable.exchange = exchange_when_all_is_here  # type: ignore[method-assign]  # this process ends with the run
    torch.manual_seed(0)
    with asynchronous_device() as device:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)).to(device.name)
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
            for batch in loader.epoch(epoch, trainer.cursor.step):
                found.append(trainer.step(batch).loss)
            found.append(trainer.evaluate(loader, metric)["metric"].value)
        return trainer.digest(), found


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return ls.launch(train, {}, workers=1)[0]


def test_the_bits_are_those_of_the_undisturbed_run(undisturbed: Any) -> None:
    results = ls.launch(train, {"0 update": 3, "2 metric": 1}, workers=3)
    assert results == [undisturbed]


def test_a_new_worker_gets_the_state_from_the_device_of_another_one(undisturbed: Any, tmp_path: Path) -> None:
    joins = tmp_path / "joins"
    results = ls.launch(train, {"1 loss": 3}, joins, workers=2, elastic=ls.Elastic(respawn=1, spares=1))
    assert [digest for digest, _ in results] == [undisturbed[0]] * 2
