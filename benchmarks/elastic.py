"""Workers of `ls.launch` are killed at seeded random moments; the others must end with the bits of the undisturbed run.

    make bench-elastic       or: python benchmarks/elastic.py [--runs 100] [--seed 0] [--only 17]

Every run trains, evaluates, saves and loads. A worker kills itself with SIGKILL when it reaches the n-th moment of a
kind: in a forward, in the optimizer, while a sample is loaded, in an evaluation, in a save, after a step, at the end
of its function, when it joins the next generation (a kill during the recovery), or at a moment of the clock, whatever
it does then. One worker always survives. Compared are the digest, all losses, the evaluations and the number of steps.

The time of a recovery is from the kill to the end of the next step of a survivor, less that run's median step. It is
taken from runs in which one worker is killed in a step. The steady cost is the difference of the median steps of two
trainers, with "continue" and with "stop", that take turns in one run of two workers.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.comm.generations import Generations, NextGeneration
from lockstep.errors import WorkerFailedError

_MOMENTS = ("loss", "update", "loader", "metric", "save", "step", "end", "join", "clock")
_LAST = {"loss": 40, "update": 12, "loader": 300, "metric": 30, "save": 3, "step": 12, "end": 1, "join": 1}
"""The highest number of a moment that is drawn; an undisturbed worker of three reaches most of these."""
_EPOCHS = 3
_SHARDS = 6
_CLOCK_SECONDS = 0.6

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


def train(run: ls.Run, kills: Kills, folder: str, seed: int) -> Any:  # noqa: C901 - the moments are closures
    """Train, evaluate, save and load; return what must not depend on who was killed."""
    rank, began, counts = run.rank, time.monotonic(), dict.fromkeys(_LAST, 0)
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
        def __len__(self) -> int:
            return 110

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            reach("loader")
            return torch.randn(8), torch.tensor(index % 3)

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
        model, optimizer, loss=loss, num_shards=_SHARDS, scheduler=scheduler, on_worker_loss="continue"
    )
    loader = ls.ShardedLoader(Data(), batch_size=30, num_shards=_SHARDS)
    seen: list[Any] = []
    if seconds is not None:
        timer.start()
    for epoch in range(_EPOCHS):
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
    reach("end")
    return trainer.digest(), seen, trainer.global_step


def draw_kills(draw: random.Random, workers: int) -> dict[str, float]:
    """Return who is killed, and when: one, several, or all but one."""
    count = draw.choice([1, 1, 2, workers - 1])
    kills: dict[str, float] = {}
    for rank in draw.sample(range(workers), min(count, workers - 1)):
        moment = draw.choice(_MOMENTS)
        number = draw.uniform(0, _CLOCK_SECONDS) if moment == "clock" else draw.randint(1, _LAST[moment])
        kills[f"{rank} {moment}"] = number
    return kills


def recovery_seconds(folder: Path) -> float | None:
    """Return the time from the kill to the end of the next step, less a step; None if that is not what was done."""
    events = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    killed = [event for event in events if event["what"] == "kill"]
    if len(killed) != 1 or killed[0]["moment"] not in {"loss", "update", "loader"}:
        return None
    steps = [event for event in events if event["what"] == "step"]
    after = [event["at"] for event in steps if event["at"] > killed[0]["at"]]
    usual = statistics.median(event["seconds"] for event in steps)
    return min(after) - killed[0]["at"] - usual if after else None


def take_turns(_run: ls.Run, num_steps: int) -> dict[str, float]:
    """Return the median seconds of a step of a trainer that continues, and of one that does not."""
    trainers, times = {}, {"continue": [0.0], "stop": [0.0]}
    kinds: tuple[Literal["continue", "stop"], ...] = ("continue", "stop")
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    for kind in kinds:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainers[kind] = ls.Trainer(
            model, optimizer, loss=_cross_entropy, num_shards=2, on_worker_loss=kind, deterministic=True
        )
    for epoch in range(num_steps):
        for kind, trainer in trainers.items():
            for batch in ls.ShardedLoader(data, batch_size=64, num_shards=2).epoch(epoch):
                started = time.perf_counter()
                trainer.step(batch)
                times[kind].append(time.perf_counter() - started)
    return {kind: statistics.median(found[num_steps // 10 :]) for kind, found in times.items()}


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    """Run the campaign, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one run")
    options = parser.parse_args()
    numbers = range(options.runs) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as folder:
        expected = ls.launch(train, {}, folder, options.seed, workers=1)[0]
    found: list[float] = []
    failed = num_kills = 0
    for number in numbers:
        draw = random.Random(f"{options.seed} {number}")
        workers = draw.choice([2, 3, 4])
        kills = draw_kills(draw, workers)
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = ls.launch(train, kills, folder, options.seed, workers=workers)
                is_equal = bool(results) and all(result == expected for result in results)
                problem = "" if is_equal else f"{len(results)} results differ"
            except WorkerFailedError as error:
                problem = str(error)
            lines = [line for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
            done = [json.loads(line) for line in lines if '"kill"' in line]
            seconds = recovery_seconds(Path(folder))
        num_kills += len(done)
        found += [] if seconds is None else [seconds]
        failed += bool(problem)
        if problem:
            print(f"run {number}: {workers} workers, {kills}, killed {[each['moment'] for each in done]}: {problem}")
    print(f"{len(numbers) - failed} of {len(numbers)} runs equal the undisturbed one; {num_kills} kills")
    if found:
        found.sort()
        slow = found[min(len(found) - 1, round(0.99 * len(found)))]
        print(f"kill to the end of the repeated step, less a step: median {statistics.median(found) * 1e3:.0f} ms, ")
        print(f"    99 % {slow * 1e3:.0f} ms, {len(found)} single kills in a step")
    medians = ls.launch(take_turns, 400, workers=2)[0]
    cost = (medians["continue"] - medians["stop"]) * 1e3
    print(f"steady cost per step: {cost:+.3f} ms of {medians['stop'] * 1e3:.2f} ms")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load {load} on {os.cpu_count()} cores, torch {torch.__version__}")


if __name__ == "__main__":
    main()
