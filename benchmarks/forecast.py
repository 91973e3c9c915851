"""The forecast of the report against what is measured, on other numbers of workers than the run had.

Runs take turns, with one thread for each worker. A forecast is made from one of them as the report makes it, and
compared with the run on the other number in the same turn. From a run on one worker it is a lower bound, because
nothing is exchanged there, and for fewer workers than the run had an upper one, because on a CPU they share its memory:
then it is shown how far it is off. Runs on 4 workers are made where there are cores for them.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import training_models
from torch import Tensor, nn

import lockstep as ls
from lockstep.recording import own_recorder
from lockstep.recording.reading import read_recording
from lockstep.report.page.measure import MeasuredSteps, forecast_steps, measure_tables

NUM_SHARDS = 4
WORDS = 20_000
GOAL = 0.10


def text() -> training_models.Batch:
    words = torch.randint(0, training_models.Transformer.WORDS, (8, training_models.Transformer.LENGTH + 1))
    return words[:, :-1], words[:, 1:]


BUILD: dict[str, tuple[Callable[[], nn.Module], Callable[[], training_models.Batch]]] = {
    "tiny MLP": (
        lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda: training_models.images(64, 20),
    ),
    "wide MLP": (training_models.mlp, lambda: training_models.images(128, 784)),
    "conv net": (training_models.conv_net, lambda: training_models.images(32, 3, 32, 32)),
    "transformer": (training_models.Transformer, text),
    "embeddings": (
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 128), nn.Linear(128, 10)),
        lambda: (torch.randint(0, WORDS, (256, 20)), torch.randint(0, 10, (256,))),
    ),
    "many small parameters": (training_models.many_tiny, lambda: training_models.images(128, 16, num_classes=16)),
}


def loss(model: nn.Module, batch: training_models.Batch) -> Tensor:
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def train(_run: ls.Run, name: str, num_steps: int) -> str:
    """Train, and return where that was recorded."""
    torch.manual_seed(0)
    build, make_batch = BUILD[name]
    model = build()
    trainer = ls.Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss=loss, num_shards=NUM_SHARDS)
    inputs, targets = make_batch()
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = ls.ShardedLoader(data, batch_size=len(inputs), num_shards=NUM_SHARDS)
    for step in range(num_steps):
        for batch in loader.epoch(step):
            trainer.step(batch)
    return str(own_recorder().directory)


def measure(name: str, workers: int, num_steps: int) -> MeasuredSteps:
    folder = ls.launch(train, name, num_steps, workers=workers, devices="cpu", threads_per_worker=1)[0]
    files = [each for each in read_recording(Path(folder)) if each.header.worker >= 0]
    measured = measure_tables([each.table for each in files], NUM_SHARDS)
    assert measured is not None
    return measured


def rows(name: str, rounds: int, num_steps: int, numbers: Sequence[int]) -> Iterable[str]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        runs = {workers: measure(name, workers, num_steps) for workers in numbers}
        for before, measured in runs.items():
            for each in forecast_steps(measured, numbers):
                if each.workers != before:
                    step = float(statistics.median(runs[each.workers].step))
                    found.setdefault((before, each.workers), []).append((each.seconds, step))
    for (before, workers), pairs in found.items():
        predicted, measured_ms = (statistics.median(values) * 1e3 for values in zip(*pairs, strict=True))
        error = statistics.median(a / b for a, b in pairs) - 1
        note = "at best" if before == 1 else "at most" if before > workers else ""
        holds = {"at best": error <= GOAL, "at most": error >= -GOAL}.get(note, abs(error) <= GOAL)
        note += "" if holds else " MISSED"
        yield (
            f"{name:22} {before} -> {workers} {predicted:9.2f} ms {measured_ms:9.2f} ms {error:+8.1%} "
            f"{os.getloadavg()[0]:6.1f} {note}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=list(BUILD), default=list(BUILD))
    options = parser.parse_args()
    print(f"{'model':22} {'':6} {'forecast':>12} {'measured':>12} {'error':>8} {'load':>6}")
    numbers = [number for number in (1, 2, 4) if number <= (os.cpu_count() or 1)]
    for name in options.models:
        for row in rows(name, options.rounds, options.steps, numbers):
            print(row, flush=True)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; the goal is {GOAL:.0%}")


if __name__ == "__main__":
    main()
