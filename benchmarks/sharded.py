"""What sharing an optimizer among the workers costs in a step, and saves in memory.

    make bench-sharded       or: python benchmarks/sharded.py [--rounds 15] [--workers 2,4] [--models mlp,transformer]

Sides of a step, of the same model and batch in the same processes, one after the other in each round: `ls.Trainer` with
the whole optimizer, and with a shared one, each part held once or twice; torch's DistributedDataParallel with the whole
optimizer, and with its ZeroRedundancyOptimizer. Figures are medians; a ratio is of sides beside each other.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from interleaved import run_round
from tables import load_average, log, print_row
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import TensorDataset
from training_models import MODELS

import lockstep as ls

SIDES = ("whole", "shared", "shared twice", "torch", "torch's ZeRO")
STEPS = 3
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "AdamW": (optim.AdamW, {"lr": 1e-4}),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a slice."""
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def make_side(side: str, name: str, kind: str, workers: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return what takes a step, and what says how many bytes of state this worker holds."""
    torch.manual_seed(0)
    made, arguments = KINDS[kind]
    model, batch = MODELS[name].build(), MODELS[name].make_batch()
    if side.startswith("torch"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer: Any = (
            made(wrapped.parameters(), **arguments)
            if side == "torch"
            else ZeroRedundancyOptimizer(wrapped.parameters(), made, **arguments)
        )

        def step() -> None:
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            optimizer.step()

        inner = getattr(optimizer, "optim", optimizer)
        return step, lambda: _num_bytes(inner.state)
    data = TensorDataset(*(each.repeat(workers * STEPS, *[1] * (each.dim() - 1)) for each in batch))
    optimizer = made(model.parameters(), **arguments)
    trainer = ls.Trainer(
        model,
        optimizer,
        loss=loss_of,
        num_shards=workers,
        shard_optimizer=side != "whole",
        neighbours=int(side == "shared twice"),
        on_worker_loss="continue",
        verify_steps=0,
    )
    batches: list[Any] = []

    def step_of_trainer() -> None:
        if not batches:
            batches.extend(trainer.loader(data, batch_size=len(batch[0]) * workers).epoch(trainer.cursor.epoch))
            batches.reverse()
        trainer.step(batches.pop())

    return step_of_trainer, lambda: trainer.internals.sharing.num_bytes or _num_bytes(optimizer.state)


def _num_bytes(state: Any) -> int:
    return sum(each.nbytes for values in state.values() for each in values.values() if isinstance(each, Tensor))


def measure(run: ls.Run, name: str, kind: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Measure all sides on the present workers (collective)."""
    made = {side: make_side(side, name, kind, run.world_size) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    errors: dict[str, str] = {}

    def measure_side(side: str) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            made[side][0]()
        return (time.perf_counter() - start) / STEPS

    for _ in range(rounds + 1):
        run_round(SIDES, measure_side, seconds, errors)
    for side, error in errors.items():
        log(f"{side}: {error}")
    return {side: found[1:] for side, found in seconds.items()}, {side: made[side][1]() for side in seconds}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--models", default="mlp,transformer")
    options = parser.parse_args()
    log(f"load {load_average()}")
    print_row("model", "optimizer", "workers", "side", "step, ms", "ratio", "state of rank 0, MB")
    for name in options.models.split(","):
        for kind in KINDS:
            for workers in map(int, options.workers.split(",")):
                seconds, held = ls.launch(measure, name, kind, options.rounds, workers=workers)[0]
                for side, found in seconds.items():
                    base = seconds["torch" if side.startswith("torch") else "whole"]
                    ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
                    step = f"{1e3 * statistics.median(found):.1f}"
                    print_row(name, kind, str(workers), side, step, f"{ratio:.2f}", f"{held[side] / 1e6:.1f}")
    log(f"load {load_average()}")


if __name__ == "__main__":
    main()
