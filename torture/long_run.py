"""Two days of training in minutes: a tiny model, with saves, evaluations, losses and resumes at random moments.

The digest at the end is that of an undisturbed run; memory, descriptors and threads of the worker that is never killed,
and of the launcher, do not grow. `python -m torture.long_run --steps 100000` runs it alone, and prints the curves.
"""

import argparse
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import lockstep as ls
from lockstep.comm import World
from lockstep.errors import WorkerFailedError
from torture.row import Row

_BATCHES = 100
_WORKERS = 2
_EVENTS = ("", "", "", "save", "save", "evaluate", "load", "loss")
_SAMPLE_STEPS = 500
"""After so many steps the worker that lives on writes down what it and its launcher hold."""
_WARM_SAMPLES = 4
_GROWTH = {"memory": 48.0, "descriptors": 4.0, "threads": 2.0}
"""How much more than in the first third may be held in the last one: MiB, and numbers."""


def run(row: Row, seed: int) -> None:
    """Train with disturbances for two thirds of the time, then as many steps without."""
    began = time.monotonic()
    _try(row, seed, 10**9, max((row.until - began) * 2 / 3, 5.0))


def _try(row: Row, seed: int, steps: int, seconds: float) -> list[dict[str, float]]:
    elastic = ls.Elastic(respawn=100_000, respawn_minutes=1e6)
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        samples.touch()
        try:
            found = ls.launch(
                _train, folder, seed, steps, seconds, None, workers=_WORKERS, devices="cpu", elastic=elastic
            )
            expected = ls.launch(_train, folder, seed, 0, 0.0, found[0]["epochs"], workers=1, devices="cpu")[0]
        except WorkerFailedError as error:
            row.note(f"seed {seed}: {str(error)[:600]}")
            return _read(samples)
        curves = _read(samples)
    for rank, each in enumerate(found):
        is_equal = each["digest"] == expected["digest"]
        row.note("" if is_equal else f"rank {rank}, seed {seed}: another digest than that of an undisturbed run")
    events = ", ".join(f"{count} {name}" for name, count in found[0]["events"].items())
    row.figures["steps"] = f"{found[0]['taken']}, of which {expected['taken']} count, with {events}"
    for name in curves[-1] if len(curves) >= 3 * _WARM_SAMPLES else ():
        if name == "steps":
            continue
        first, last = _grown([each[name] for each in curves])
        row.figures[name] = f"{first:.1f} -> {last:.1f}"
        has_grown = last - first > _GROWTH[name.split()[-1]]
        row.note(f"seed {seed}: {name} has grown from {first:.1f} to {last:.1f}" if has_grown else "")
    return curves


def _grown(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first third, without the warm-up, and of the last."""
    third = len(values) // 3
    return statistics.median(values[min(_WARM_SAMPLES, third - 1) : third]), statistics.median(values[-third:])


def _read(samples: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in samples.read_text().splitlines()]


@dataclass(slots=True)
class _Loop:
    """What the loop keeps beside the trainer, the same on all workers."""

    taken: int = 0
    has_saved: bool = False
    dies_at: int = -1
    """The number of taken steps at which a worker other than the first kills itself."""
    save: int = 0
    evaluate: int = 0
    load: int = 0
    loss: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _train(run_: ls.Run, folder: str, seed: int, steps: int, seconds: float, epochs: int | None) -> dict[str, Any]:
    """Train until enough steps were taken or the time is over, with disturbances; or some epochs without."""
    loop, worker, deadline = _Loop(), run_.local_rank, time.monotonic() + seconds

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if worker != 0 and loop.taken == loop.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def is_late(world: World) -> bool:
        return any(world.gather_objects(worker == 0 and time.monotonic() > deadline))

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=2, seed=seed, on_worker_loss="continue")
    data = torch.utils.data.TensorDataset(torch.randn(20 * _BATCHES, 8), torch.arange(20 * _BATCHES) % 3)
    loader = ls.ShardedLoader(data, batch_size=20, num_shards=2, seed=seed)
    trainer.join(loop)
    while epochs is None or trainer.cursor.epoch < epochs:
        for batch in loader.epoch(trainer.cursor.epoch, trainer.cursor.step):
            trainer.step(batch)
            loop.taken += 1
            if worker == 0 and epochs is None and loop.taken % _SAMPLE_STEPS == 0:
                _note(Path(folder) / "samples.jsonl", loop.taken)
        if epochs is None and (loop.taken >= steps or trainer.repeatable(is_late)):
            break
        if epochs is None:
            _disturb(trainer, loader, loop, seed, Path(folder) / "run.ckpt")
    events = {name: getattr(loop, name) for name in ("save", "evaluate", "load", "loss")}
    return {"digest": trainer.digest(), "epochs": trainer.cursor.epoch, "taken": loop.taken, "events": events}


def _disturb(trainer: ls.Trainer, loader: ls.ShardedLoader, loop: _Loop, seed: int, path: Path) -> None:
    draw = random.Random(f"{seed} {loop.taken}")  # the same on all workers
    event = draw.choice(_EVENTS)
    if event == "save":
        trainer.save(path)
        loop.has_saved = True
    elif event == "evaluate":
        trainer.evaluate(loader, _metric)
    elif event == "load" and loop.has_saved:
        trainer.load(path)
    elif event == "loss":
        loop.dies_at = loop.taken + draw.randrange(_BATCHES)
    if event:
        setattr(loop, event, getattr(loop, event) + 1)


def _note(path: Path, steps: int) -> None:
    values: dict[str, float] = {"steps": steps}
    for name, pid in (("worker", os.getpid()), ("launcher", os.getppid())):
        process = psutil.Process(pid)
        values[f"{name} memory"] = process.memory_info().rss / 2**20
        values[f"{name} descriptors"] = process.num_fds()
        values[f"{name} threads"] = process.num_threads()
    with path.open("a") as stream:
        stream.write(json.dumps(values) + "\n")


def _metric(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def main() -> None:
    """Run it alone, and print what was held every so many steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="of the disturbed run, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("lockstep").setLevel(logging.ERROR)  # else the launcher logs a line for each loss
    began = time.monotonic()
    row = Row("long_run", began)
    curves = _try(row, options.seed, options.steps, 60 * options.minutes)
    for each in curves[:: max(1, len(curves) // 20)]:
        print("  ".join(f"{name} {value:.0f}" for name, value in each.items()))
    for name, figure in row.figures.items():
        print(f"{name}: {figure}")
    print(f"{row.num_tried} tried, {len(row.problems)} wrong; {(time.monotonic() - began) / 60:.1f} minutes, ", end="")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
    raise SystemExit(bool(row.problems))


if __name__ == "__main__":
    main()
