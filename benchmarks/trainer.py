"""What `ls.Trainer` and `lockstep train` cost compared with a plain loop and with torch's DistributedDataParallel.

    make bench-trainer       or: python benchmarks/trainer.py [--rounds 15] [--parts loop,job,features,audit]

loop: `ls.Trainer` with 4 shards, one worker, compared with a loop that adds up the gradients of the same 4 slices; the
network of the digits, the same batches through a DataLoader. With 4 processes each process trains alone. A loop
with one backward per batch shows what slices cost by themselves.

job: `lockstep train examples/digits.yaml` compared with benchmarks/torch_digits.py under torchrun: samples per second
of the training, the evaluations and saves between the epochs left out on both sides. The runs alternate.

features: an epoch of the trainer and an evaluation, with one feature switched on, compared with none.

audit: steps of two workers of larger models, with the audit log and without, in CPU time of rank 0.

Figures are medians over the rounds; the sides of `loop` and `features` alternate in the same processes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from interleaved import run_round
from tables import NOISY_SPREAD, load_average, log, mark, print_row
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training_models import MODELS

import lockstep as ls
from lockstep.comm import World
from lockstep.recipes.digits import Net, datasets
from lockstep.runs.audit_log import AuditLog

BATCH_SIZE = 128
NUM_SHARDS = 4
ALONE = World(rank=0, world_size=1, group=None)
ROOT = Path(__file__).parents[1]
FEATURES = (
    *("none", "a callback", "several metrics", "a value beside the loss", "gradient norm", "early stopping"),
    *("warm-up", "EMA"),
)
Loop = Callable[[int], float]
"""Trains for one epoch; returns its seconds."""


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a slice."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the network and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.002)


def make_loader(*, is_test: bool = False) -> ls.ShardedLoader:
    """Make the loader of the trainer."""
    data = datasets()[is_test]
    return ls.ShardedLoader(data, batch_size=BATCH_SIZE, num_shards=NUM_SHARDS, shuffle=not is_test, world=ALONE)


# -- A plain loop ------------------------------------------------------------------------------------------------------


def make_plain(num_slices: int = NUM_SHARDS) -> Loop:
    """Make a loop that adds up the gradients of slices."""
    model, optimizer = build()
    loader = make_loader()
    data = datasets()[0]

    def train(epoch: int) -> float:
        parts = [part.indices for batch in loader.epoch(epoch) for part in batch.slices]
        together = NUM_SHARDS // num_slices
        slices = [list(chain(*parts[first : first + together])) for first in range(0, len(parts), together)]
        began, total = time.perf_counter(), 0.0
        for number, (images, digits) in enumerate(DataLoader(data, batch_sampler=slices), start=1):
            loss = loss_of(model, (images, digits)) / num_slices
            loss.backward()
            total += loss.item()
            if number % num_slices == 0:
                optimizer.step()
                optimizer.zero_grad()
        return time.perf_counter() - began

    return train


def make_trainer() -> Loop:
    """Make the loop of a trainer."""
    model, optimizer = build()
    trainer = ls.Trainer(model, optimizer, loss=loss_of, num_shards=NUM_SHARDS, world=ALONE)
    loader = make_loader()

    def train(epoch: int) -> float:
        began, total = time.perf_counter(), 0.0
        for batch in loader.epoch(epoch):
            total += trainer.step(batch).loss
        return time.perf_counter() - began

    return train


def time_loops(_run: ls.Run, rounds: int) -> dict[str, list[float]]:
    """Return seconds per step of the slowest process, for each side and round (collective)."""
    sides: dict[str, Loop] = {"whole": make_plain(num_slices=1), "plain": make_plain(), "trainer": make_trainer()}
    return alternate(sides, rounds, len(make_loader()))


def alternate(sides: Mapping[str, Loop], rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return seconds per step of each side (collective); a side returns the seconds of an epoch."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, str] = {}

    def measure(epoch: int, name: str) -> float:
        return sides[name](epoch) / num_steps

    for name in names:
        sides[name](0)
    for number in range(rounds):
        first = number % len(names)
        run_round([*names[first:], *names[:first]], partial(measure, number + 1), seconds, errors)
    if errors:
        raise RuntimeError(str(errors))
    return seconds


# -- Features ----------------------------------------------------------------------------------------------------------


class CountingSteps(ls.Callback):
    """Counts steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step(self, trainer: Any, result: Any) -> None:  # noqa: ARG002 - the protocol has them
        """Count one."""
        self.num_steps += 1


def count_right(model: nn.Module, batch: Any) -> Any:
    """Return how many digits of a slice are right."""
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])


def several_metrics(model: nn.Module, batch: Any) -> Any:
    """Return three metrics of a slice."""
    scores = model(batch[0])
    best = scores.topk(3).indices == batch[1][:, None]
    num, loss = len(batch[1]), nn.functional.cross_entropy(scores, batch[1], reduction="sum")
    return {"accuracy": (best[:, 0].sum(), num), "top3": (best.sum(), num), "loss": (loss, num)}


def loss_with_value(model: nn.Module, batch: Any) -> Any:
    """Return the loss of a slice, and a value beside it."""
    scores = model(batch[0])
    right = (scores.detach().argmax(1) == batch[1]).float().mean()
    return {"loss": nn.functional.cross_entropy(scores, batch[1], label_smoothing=0.1), "accuracy": right}


def make_feature(name: str) -> Loop:
    """Make the loop of a trainer with one feature switched on."""
    model, optimizer = build()
    by_name: dict[str, dict[str, Any]] = {
        "a callback": {"callbacks": [CountingSteps()]},
        "gradient norm": {"track_grad_norm": True},
        "early stopping": {"callbacks": [ls.EarlyStopping("metric", mode="max", patience=10**6)]},
        "warm-up": {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)},
        "EMA": {"callbacks": [ls.EMA(decay=0.999)]},
    }
    options = by_name.get(name, {})
    loss = loss_with_value if name == "a value beside the loss" else loss_of
    metric = several_metrics if name == "several metrics" else count_right
    trainer = ls.Trainer(model, optimizer, loss=loss, num_shards=NUM_SHARDS, world=ALONE, **options)
    train_loader, test_loader = make_loader(), make_loader(is_test=True)

    def train(epoch: int) -> float:
        began, total = time.perf_counter(), 0.0
        for batch in train_loader.epoch(epoch):
            total += trainer.step(batch).loss
        trainer.evaluate(test_loader, metric)
        return time.perf_counter() - began

    return train


def time_features(_run: ls.Run, rounds: int) -> dict[str, list[float]]:
    """Return seconds of an epoch and an evaluation, for every feature and round."""
    return alternate({name: make_feature(name) for name in FEATURES}, rounds, 1)


# -- The audit log -----------------------------------------------------------------------------------------------------


def make_audited(run: ls.Run, name: str, folder: str, num_steps: int, *, is_audited: bool) -> Loop:
    """Make the loop of a trainer of a larger model."""
    torch.manual_seed(0)
    built = MODELS[name]
    model = built.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = ls.Trainer(model, optimizer, loss=loss_of_last, num_shards=NUM_SHARDS, verify_steps=0)
    batches = [built.make_batch() for _ in range(run.world_size * num_steps)]
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    loader = trainer.loader(data, batch_size=len(data) // num_steps)
    log_file = AuditLog(Path(folder), {})
    if is_audited:
        trainer.internals.audited()

    def train(epoch: int) -> float:
        began, total = time.process_time(), 0.0
        for batch in loader.epoch(epoch):
            total += trainer.step(batch).loss
            for event in trainer.internals.audited() if is_audited else ():
                if run.rank == 0:
                    log_file.record(event)
        return time.process_time() - began

    return train


def loss_of_last(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over all that is classified."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def time_audit(run: ls.Run, name: str, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a step, without and with the log (collective)."""
    num_steps = 4 * MODELS[name].steps
    sides = {
        side: make_audited(run, name, folder, num_steps, is_audited=side == "with") for side in ("without", "with")
    }
    return alternate(sides, rounds, num_steps)


def print_audit(rounds: int) -> None:
    """Print what the audit log costs."""
    print_row("model", "step without, ms", "step with, ms", "with / without")
    print_row(*["---"] * 4)
    for name in ("mlp", "transformer", "conv"):
        log(f"audit, {name} ...")
        with tempfile.TemporaryDirectory() as folder:
            seconds = ls.launch(time_audit, name, folder, rounds, devices="cpu:2")[0]
        cells = [f"{mark(seconds[side])}{1000 * statistics.median(seconds[side]):.2f}" for side in seconds]
        print_row(MODELS[name].title, *cells, show_ratio(seconds, "with", "without", digits=3))


# -- The main job ------------------------------------------------------------------------------------------------------


def run_job(folder: Path, workers: int, num_shards: int, epochs: int) -> float:
    """Return the median samples per second of the epochs of `lockstep train`, the first one left out."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "lockstep", "train", str(ROOT / "examples" / "digits.yaml")]
    options = [f"run_dir={run_dir}", f"device_ids=cpu:{workers}", f"num_shards={num_shards}", f"epochs={epochs}"]
    subprocess.run([*command, *options, "report=false"], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    rates: list[float] = [line["samples_per_second"] for line in lines if line["kind"] == "epoch"]
    return statistics.median(rates[1:])


def run_torch(workers: int, epochs: int) -> float:
    """Return the same of torch's DistributedDataParallel on Gloo."""
    script = Path(__file__).with_name("torch_digits.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(epochs)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    rates: list[float] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    return statistics.median(rates[1:])


def print_job(rounds: int, epochs: int) -> None:
    """Print how fast the main job is."""
    print_row("workers", "shards", "torch, samples/s", "Lockstep, samples/s", "Lockstep / torch")
    print_row(*["---"] * 5)
    for workers, num_shards in ((2, 2), (2, 4), (4, 4)):
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(rounds):
            log(f"job, {workers} workers, {num_shards} shards, round {number + 1} ...")
            with tempfile.TemporaryDirectory() as folder:
                for is_ours in (number % 2 == 0, number % 2 == 1):
                    if is_ours:
                        ours.append(run_job(Path(folder), workers, num_shards, epochs))
                    else:
                        theirs.append(run_torch(workers, epochs))
        first, second = statistics.median(theirs), statistics.median(ours)
        print_row(
            *(str(workers), str(num_shards), f"{mark(theirs)}{first:.0f}", f"{mark(ours)}{second:.0f}"),
            f"{mark(ours, theirs)}{second / first:.2f}",
        )


# -- Tables ------------------------------------------------------------------------------------------------------------


def print_loops(rounds: int) -> None:
    """Print how long a step takes."""
    print_row("processes", "one backward, ms", "plain loop, ms", "trainer, ms", "plain / one", "trainer / plain")
    print_row(*["---"] * 6)
    for processes in (1, 4):
        log(f"loop, {processes} processes ...")
        seconds = ls.launch(time_loops, rounds, devices=f"cpu:{processes}")[0]
        cells = [f"{mark(seconds[side])}{1000 * statistics.median(seconds[side]):.1f}" for side in seconds]
        print_row(
            str(processes), *cells, show_ratio(seconds, "plain", "whole"), show_ratio(seconds, "trainer", "plain")
        )


def print_features(rounds: int) -> None:
    """Print what features cost."""
    print_row("feature", "epoch and evaluation, ms", "with / without")
    print_row(*["---"] * 3)
    log("features ...")
    seconds = ls.launch(time_features, rounds, devices="cpu:1")[0]
    for name in FEATURES:
        milliseconds = 1000 * statistics.median(seconds[name])
        print_row(name, f"{mark(seconds[name])}{milliseconds:.0f}", show_ratio(seconds, name, "none"))


def show_ratio(seconds: dict[str, list[float]], side: str, other: str, digits: int = 2) -> str:
    """Show the median of the ratios of the rounds, in each of which the sides ran one after the other."""
    ratios = [ours / theirs for ours, theirs in zip(seconds[side], seconds[other], strict=True)]
    return f"{mark(ratios)}{statistics.median(ratios):.{digits}f}"


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measurements per side; default 15")
    parser.add_argument("--jobs", type=int, default=5, help="runs per side of the main job; default 5")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the main job; default 20")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["loop", "job", "features", "audit"])
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its tables in Markdown."""
    options = parse_options()
    began = time.monotonic()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, one thread per "
        f"worker; load average before the run {load_average()}\n\n~: quartiles further apart than "
        f"{NOISY_SPREAD:.0%} of the median.\n"
    )
    if "loop" in options.parts:
        print(f"Time of a step, {NUM_SHARDS} shards or slices of a batch of {BATCH_SIZE}\n")
        print_loops(options.rounds)
    if "job" in options.parts:
        print("\n`lockstep train examples/digits.yaml` and the same training with torch on Gloo\n")
        print_job(options.jobs, options.epochs)
    if "features" in options.parts:
        print("\nFeatures\n")
        print_features(options.rounds)
    if "audit" in options.parts:
        print("\nThe audit log, two workers\n")
        print_audit(options.rounds)
    print(f"\nLoad average after the run {load_average()}; it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
