"""A training whose workers kill themselves at given moments, for `elastic.py` and tests/process/test_recovery.py."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.comm.generations import Generations, NextGeneration

LAST = {"loss": 40, "update": 12, "loader": 300, "metric": 30, "save": 3, "step": 12, "end": 1, "join": 1}
"""The highest number of a moment that is drawn; an undisturbed worker of three reaches most of these."""
_EPOCHS = 3
_SHARDS = 6

Kills = Mapping[str, float]
"""The moment at which a worker of a rank kills itself, as "rank moment": number or, for the clock, seconds."""


class Model(nn.Module):
    """Has all that a repeated step could disturb: BatchNorm, dropout, a sparse embedding, a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.detach().mean()
        outputs: Tensor = self.layers(inputs)
        return outputs


class KillingAdamW(torch.optim.AdamW):
    """Reports that it makes an update."""

    reach: Any = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.reach("update")
        return result


def train(  # noqa: C901 - the moments are closures
    run: ls.Run, kills: Kills, folder: str, seed: int = 0, on_worker_loss: Literal["continue", "stop"] = "continue"
) -> Any:
    """Train, evaluate, save and load; return what must not depend on who was killed."""
    rank, began, counts = run.rank, time.monotonic(), dict.fromkeys(LAST, 0)
    worker, log = os.getpid(), Path(folder) / f"{run.rank}.jsonl"

    def note(what: str, **values: Any) -> None:
        with log.open("a") as stream:
            stream.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")

    def kill(moment: str) -> None:
        note("kill", moment=moment, after=time.monotonic() - began)
        os.kill(worker, signal.SIGKILL)

    def reach(moment: str) -> None:
        counts[moment] += 1
        if kills.get(f"{rank} {moment}") == counts[moment]:
            kill(moment)

    def join_next(self: Generations) -> tuple[World, NextGeneration]:
        reach("join")
        return join(self)

    join = Generations.join_next
    Generations.join_next = join_next  # type: ignore[method-assign]  # this process ends with the run
    if (seconds := kills.get(f"{rank} clock")) is not None:
        timer = threading.Timer(seconds, kill, ["clock"])
        timer.daemon = True

    class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        epoch = 0

        def __len__(self) -> int:
            return 110

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            reach("loader")
            return torch.randn(8) + self.epoch, torch.tensor(index % 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        reach("loss")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        reach("metric")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    torch.manual_seed(seed)
    model = Model()
    optimizer = KillingAdamW(model.parameters(), lr=0.01)
    optimizer.reach = reach
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    trainer = ls.Trainer(
        model, optimizer, loss=loss, num_shards=_SHARDS, scheduler=scheduler, on_worker_loss=on_worker_loss
    )
    data = Data()
    loader = ls.ShardedLoader(data, batch_size=30, num_shards=_SHARDS)
    seen: list[Any] = []
    if seconds is not None:
        timer.start()
    for epoch in range(_EPOCHS):
        data.epoch = epoch  # new workers, and those that stay, see it
        for batch in loader.epoch(epoch):
            started = time.monotonic()
            seen.append(trainer.step(batch).loss)
            note("step", seconds=time.monotonic() - started)
            reach("step")
        seen.append(trainer.evaluate(loader, metric)["metric"].value)
        reach("save")
        trainer.save(Path(folder) / "run.ckpt", metrics={"epoch": epoch})
        if epoch == 1:
            seen.append(trainer.load(Path(folder) / "run.ckpt").global_step)
    places = run.rank, run.world_size, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert places == (dist.get_rank(), dist.get_world_size()) * 2
    reach("end")
    return trainer.digest(), seen, trainer.global_step
