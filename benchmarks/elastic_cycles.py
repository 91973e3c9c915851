"""One run in which workers are lost and new ones join, again and again: what each costs, and what grows.

Workers other than the first kill themselves within a step whenever all are there; the launcher replaces each by a
spare. The first worker lives through all of it and is measured. Called by `benchmarks/elastic.py`.
"""

import json
import logging
import os
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import lockstep as ls

_WORKERS = 3
_SHARDS = 6
_STEPS_PER_EPOCH = 200
_BETWEEN = 10
"""At least so many steps lie between two losses."""
_FEW = 3
"""How many losses and joins a run needs for its growth to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """What was measured."""

    losses: list[float]
    """From each kill to the end of the repeated step, less a step, in seconds."""
    joins: list[float]
    """How much longer than others the step took after which workers joined, in seconds."""
    replacements: list[float]
    """From the end of the step that a loss repeated until a new worker has joined, in seconds. The first ones have
    waited as spares; later ones import torch first."""
    growth: dict[str, tuple[float, float]]
    """The first worker's memory (MB), descriptors and threads, after the first losses and after the last ones."""
    is_equal: bool
    """Whether the digest is that of the undisturbed run."""


def run_cycles(num_steps: int, pause_seconds: float, width: int = 256) -> Cycles:
    """Run once without disturbance and once with losses and joins.

    Args:
        num_steps: How many steps the run has.
        pause_seconds: How long each shard waits, so that new workers come in time.
        width: Of the hidden layer. The state of the run has 12 bytes for each of its 75 parameters per unit.
    """
    with tempfile.TemporaryDirectory() as folder:
        expected = ls.launch(train, folder, num_steps, 0.0, width, workers=1)[0]
    with tempfile.TemporaryDirectory() as folder:
        elastic = ls.Elastic(respawn=10_000, spares=1)
        found = ls.launch(train, folder, num_steps, pause_seconds, width, workers=_WORKERS, elastic=elastic)
        events = [json.loads(line) for line in Path(folder, "0.jsonl").read_text().splitlines()]
        killed = [float(file.read_text()) for file in Path(folder).glob("*.killed")]
    return _evaluate(events, sorted(killed), is_equal=bool(found) and all(digest == expected for digest in found))


def train(run: ls.Run, folder: str, num_steps: int, pause_seconds: float, width: int) -> str:
    """Train, and die in a step if it is this worker's turn; return the digest."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)  # else rank 0 logs a line for each loss
    worker = run.local_rank
    is_main = threading.get_ident()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(pause_seconds)
        step = trainer.global_step
        is_turn = step % _BETWEEN == 0 and run.world_size == _WORKERS and run.rank == 1 + step // _BETWEEN % 2
        if is_turn and worker != 0 and threading.get_ident() == is_main:
            Path(folder, f"{worker}.killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=_SHARDS, on_worker_loss="continue")
    inputs = torch.randn(30 * _STEPS_PER_EPOCH, 64, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, torch.arange(len(inputs)) % 8)
    loader = ls.ShardedLoader(data, batch_size=30, num_shards=_SHARDS)
    trainer.join()
    with Path(folder, f"{worker}.jsonl").open("a") as log:
        for epoch in range(trainer.cursor.epoch, num_steps // _STEPS_PER_EPOCH):
            for batch in loader.epoch(epoch, trainer.cursor.step):
                started, before = time.monotonic(), run.world_size
                trainer.step(batch)
                if worker == 0:
                    _note(log, started, before, run.world_size)
    return trainer.digest()


def _note(log: Any, started: float, before: int, after: int) -> None:
    values: dict[str, Any] = {
        "at": time.monotonic(),
        "seconds": time.monotonic() - started,
        "arrived": after > before,
        "lost": after < before,
    }
    if after != before:
        process = psutil.Process()
        values["held"] = [process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()]
    log.write(json.dumps(values) + "\n")


def _evaluate(events: list[dict[str, Any]], killed: list[float], *, is_equal: bool) -> Cycles:
    usual = statistics.median(event["seconds"] for event in events)
    losses = []
    for moment in killed:
        after = [event["at"] for event in events if event["at"] > moment]
        losses += [min(after) - moment - usual] if after else []
    held = [event["held"] for event in events if "held" in event]
    growth: dict[str, tuple[float, float]] = {}
    if len(held) >= 4 * _FEW:
        for index, name in enumerate(("memory, MB", "descriptors", "threads")):
            first, last = held[_FEW : 2 * _FEW + 1], held[-_FEW - 1 :]
            growth[name] = statistics.mean(row[index] for row in first), statistics.mean(row[index] for row in last)
    joins = [event["seconds"] - usual for event in events if event["arrived"]]
    replacements, lost_at = [], None
    for event in events:
        if event["arrived"] and lost_at is not None:
            replacements.append(event["at"] - lost_at)
        lost_at = event["at"] if event["lost"] else None if event["arrived"] else lost_at
    return Cycles(
        losses=sorted(losses),
        joins=sorted(joins),
        replacements=sorted(replacements),
        growth=growth,
        is_equal=is_equal,
    )
