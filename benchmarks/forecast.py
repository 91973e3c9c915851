"""The forecast of the report against what is measured: a step on 2 workers from a run on 1, and the other way round.

Runs on 1 and on 2 workers take turns, with one thread for each worker. A forecast is made from one of them as the
report makes it, and compared with the next run on the other number.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import training_models
from torch import Tensor, nn

import lockstep as ls
from lockstep.recording import own_recorder
from lockstep.recording.reading import read_recording
from lockstep.report.page.forecast import MeasuredSteps, forecast_steps
from lockstep.report.page.measured import measure_tables

NUM_SHARDS = 4
WORDS = 20_000


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


def forecast(measured: MeasuredSteps, workers: int) -> float:
    return next(each.seconds for each in forecast_steps(measured, (1, 2)) if each.workers == workers)


def rows(name: str, rounds: int, num_steps: int) -> Iterable[str]:
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        runs = {workers: measure(name, workers, num_steps) for workers in (1, 2)}
        for workers, before in ((1, 2), (2, 1)):
            found[workers].append((forecast(runs[before], workers), float(statistics.median(runs[workers].step))))
    for workers, before in ((2, 1), (1, 2)):
        predicted, measured = (statistics.median(values) * 1e3 for values in zip(*found[workers], strict=True))
        error = statistics.median(a / b for a, b in found[workers]) - 1
        load = os.getloadavg()[0]
        yield f"{name:22} {before} -> {workers} {predicted:9.2f} ms {measured:9.2f} ms {error:+8.1%} {load:6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=list(BUILD), default=list(BUILD))
    options = parser.parse_args()
    print(f"{'model':22} {'':6} {'forecast':>12} {'measured':>12} {'error':>8} {'load':>6}")
    for name in options.models:
        for row in rows(name, options.rounds, options.steps):
            print(row, flush=True)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; 4 workers and more are not measured where cores lack")


if __name__ == "__main__":
    main()
