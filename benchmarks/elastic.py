"""Workers of `ls.launch` are killed at seeded random moments; the others must end with the bits of the undisturbed run.

    make bench-elastic       or: python benchmarks/elastic.py [--runs 12] [--steps 1600] [--seed 0] [--only 17]

Every run trains, evaluates, saves and loads. A worker kills itself with SIGKILL when it reaches the n-th moment of a
kind: in a forward, in the optimizer, while a sample is loaded, in an evaluation, in a save, after a step, at the end
of its function, when it joins the next generation (a kill during the recovery), or at a moment of the clock, whatever
it does then. One worker always survives. Compared are the digest, all losses, the evaluations and the number of steps.

The time of a recovery is from the kill to the end of the next step of a survivor, less that run's median step. It is
taken from a run of three workers in which workers are lost and replaced again and again (`elastic_cycles.py`), and so
are the pause of the others when a worker joins, and what grows. The steady cost is the difference of the median steps
of two trainers, with "continue" and with "stop", that take turns in one run of two workers. All is done on shared
memory and on Gloo, and takes about ten minutes on two quiet cores.
"""

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from elastic_cycles import run_cycles
from mortal_training import LAST, Model, train
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import WorkerFailedError

_MOMENTS = ("loss", "update", "loader", "metric", "save", "step", "end", "join", "clock")
_CLOCK_SECONDS = 0.6
_LARGE_WIDTH = 111_000
"""Of the model whose state has 100 MB: parameters and AdamW's two moments of each."""
_LARGE_STEPS = 200
_PAUSE_SECONDS = 0.01
"""How long a shard of the run with many losses takes at least."""


def draw_kills(draw: random.Random, workers: int) -> dict[str, float]:
    """Return who is killed, and when: one, several, or all but one."""
    count = draw.choice([1, 1, 2, workers - 1])
    kills: dict[str, float] = {}
    for rank in draw.sample(range(workers), min(count, workers - 1)):
        moment = draw.choice(_MOMENTS)
        number = draw.uniform(0, _CLOCK_SECONDS) if moment == "clock" else draw.randint(1, LAST[moment])
        kills[f"{rank} {moment}"] = number
    return kills


def train_quietly(run: ls.Run, kills: dict[str, float], folder: str, seed: int) -> Any:
    """Train without the line that rank 0 logs for each loss."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return train(run, kills, folder, seed)


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


def kill_at_random(numbers: Sequence[int], seed: int) -> str:
    """Kill workers at random moments in runs of these numbers; return how many runs were equal to the undisturbed one.

    Prints how a run that was not can be repeated.
    """
    with tempfile.TemporaryDirectory() as folder:
        expected = ls.launch(train_quietly, {}, folder, seed, workers=1)[0]
    failed = num_kills = 0
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        workers = draw.choice([2, 3, 4])
        kills = draw_kills(draw, workers)
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = ls.launch(train_quietly, kills, folder, seed, workers=workers)
                is_equal = bool(results) and all(result == expected for result in results)
                problem = "" if is_equal else f"{len(results)} results differ"
            except WorkerFailedError as error:
                problem = str(error)
            lines = [line for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
            done = [json.loads(line) for line in lines if '"kill"' in line]
        num_kills += len(done)
        failed += bool(problem)
        if problem:
            print(f"run {number}: {workers} workers, {kills}, killed {[each['moment'] for each in done]}: {problem}")
    return f"{len(numbers) - failed} of {len(numbers)} ({num_kills} kills)"


def measure(backend: str, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return what was found with a backend: what it is, and the figure."""
    os.environ["LOCKSTEP_CPU_BACKEND"] = backend  # of the workers
    numbers = range(options.runs) if options.only is None else [options.only]
    rows = [("runs with kills at random moments that equal the undisturbed one", kill_at_random(numbers, options.seed))]
    if options.only is not None:
        return rows
    cycles = run_cycles(options.steps, _PAUSE_SECONDS)
    rows += [
        ("kill to the end of the repeated step, less a step", in_milliseconds(cycles.losses)),
        ("pause of the others when a worker joins", in_milliseconds(cycles.joins)),
        ("digest after these losses and joins", "that of the undisturbed run" if cycles.is_equal else "DIFFERS"),
        *(
            (f"{name} of a worker that lived through them", f"{first:.0f} -> {last:.0f}")
            for name, (first, last) in cycles.growth.items()
        ),
    ]
    large = run_cycles(_LARGE_STEPS, 0.0, _LARGE_WIDTH)
    rows += [
        (
            "the same with 100 MB of state: kill to the end of the repeated step, less a step",
            in_milliseconds(large.losses),
        ),
        ("pause of the others when a worker joins, with 100 MB of state", in_milliseconds(large.joins)),
        (
            "from a loss to the end of the step before which a new worker joined, with 100 MB of state: soonest",
            f"{large.replacements[0] * 1e3:.0f} ms ({len(large.replacements)})" if large.replacements else "none",
        ),
        ("digest after these", "that of the undisturbed run" if large.is_equal else "DIFFERS"),
    ]
    medians = ls.launch(take_turns, 400, workers=2)[0]
    cost = (medians["continue"] - medians["stop"]) * 1e3
    return [*rows, ("steady cost per step", f"{cost:+.3f} ms of {medians['stop'] * 1e3:.2f} ms")]


def in_milliseconds(sorted_seconds: Sequence[float]) -> str:
    """Return median, 99th percentile and number of some times as text."""
    if not sorted_seconds:
        return "none"
    slow = sorted_seconds[min(len(sorted_seconds) - 1, round(0.99 * len(sorted_seconds)))]
    median = statistics.median(sorted_seconds)
    return f"median {median * 1e3:.0f} ms, 99 % {slow * 1e3:.0f} ms ({len(sorted_seconds)})"


def main() -> None:
    """Measure both backends, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=12, help="runs with kills at random moments, for each backend")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the run with many losses, for each backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one run with kills")
    parser.add_argument("--backends", default="shm,gloo")
    options = parser.parse_args()
    logging.getLogger("lockstep").setLevel(logging.ERROR)  # the launcher's lines
    backends = options.backends.split(",")
    found = [measure(backend, options) for backend in backends]
    rows = {name: [dict(each).get(name, "-") for each in found] for name, _ in found[0]}
    print(f"| | {' | '.join(backends)} |\n|---|{'---|' * len(backends)}")
    for name, figures in rows.items():
        print(f"| {name} | {' | '.join(figures)} |")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load {load} on {os.cpu_count()} cores, torch {torch.__version__}")


if __name__ == "__main__":
    main()
