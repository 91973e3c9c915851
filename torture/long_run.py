"""Two days of training in minutes: a tiny model, with saves, evaluations and resumes at random moments.

The digest at the end is that of an undisturbed run, and memory, descriptors and threads of the workers do not grow.
"""

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import WorkerFailedError
from torture.row import Row

_BATCHES = 100
_WARM_EPOCHS = 15
_GROWTH_BYTES = 48 << 20


def run(row: Row, seed: int) -> None:
    """Train with disturbances for half of the time, then as many steps without."""
    began = time.monotonic()
    seconds = max((row.until - began) / 2, 5.0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            disturbed = ls.launch(_train, folder, seed, seconds, None, workers=2, devices="cpu")
            epochs = disturbed[0]["epochs"]
            plain = ls.launch(_train, folder, seed, 0.0, epochs, workers=1, devices="cpu")[0]
        except WorkerFailedError as error:
            row.note(str(error)[:600])
            return
    for rank, found in enumerate(disturbed):
        problem = "" if found["digest"] == plain["digest"] else "another digest than that of an undisturbed run"
        if found["grown"] > _GROWTH_BYTES:
            problem = f"memory has grown by {found['grown'] >> 20} MiB"
        if found["descriptors"] > 0 or found["threads"] > 0:
            problem = f"{found['descriptors']} more descriptors and {found['threads']} more threads"
        row.note(f"rank {rank}, seed {seed}: {problem}" if problem else "")
    row.figures["steps"] = f"{disturbed[0]['steps']} with {disturbed[0]['events']} disturbances"
    row.figures["memory"] = f"{max(each['grown'] for each in disturbed) / 2**20:+.1f} MiB at most"


def _train(run_: ls.Run, folder: str, seed: int, seconds: float, epochs: int | None) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ls.Trainer(model, optimizer, loss=_loss, num_shards=2, seed=seed)
    data = torch.utils.data.TensorDataset(torch.randn(20 * _BATCHES, 8), torch.arange(20 * _BATCHES) % 3)
    loader = ls.ShardedLoader(data, batch_size=20, num_shards=2, seed=seed)
    draw = random.Random(seed)  # the same on all ranks
    path = Path(folder) / "run.ckpt"
    deadline = time.monotonic() + seconds
    done = events = steps = saved = 0
    first: tuple[int, int, int] | None = None
    while not _is_over(run_, done, epochs, deadline):
        for batch in loader.epoch(done):
            trainer.step(batch)
            steps += 1
        done += 1
        if epochs is not None:
            continue
        event = draw.choice(["", "", "save", "evaluate", "load"])
        events += bool(event)
        if event == "save":
            trainer.save(path)
            saved = done
        elif event == "evaluate":
            trainer.evaluate(loader, _metric)
        elif event == "load" and saved:
            trainer.load(path)
            done = saved
        if done >= _WARM_EPOCHS and first is None:
            first = _measure()
    last = _measure()
    first = first or last
    grown, descriptors, threads = (now - before for now, before in zip(last, first, strict=True))
    return {
        "digest": trainer.digest(),
        "epochs": done,
        "steps": steps,
        "events": events,
        "grown": grown,
        "descriptors": descriptors,
        "threads": threads,
    }


def _is_over(run_: ls.Run, done: int, epochs: int | None, deadline: float) -> bool:
    if epochs is not None:
        return done >= epochs
    late = torch.tensor([float(run_.rank == 0 and time.monotonic() > deadline)])
    torch.distributed.all_reduce(late)
    return bool(late)


def _measure() -> tuple[int, int, int]:
    process = psutil.Process(os.getpid())
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _metric(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
