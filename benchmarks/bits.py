"""Cost of equal bits: a step of the trainer compared with DistributedDataParallel, and unevenly fast workers.

    make bench-bits       or: python benchmarks/bits.py [--worlds 2,4] [--rounds 11] [--parts each,several,uneven]

each: one shard per worker. The trainer adds in the order of the tree, our DistributedDataParallel in the group's order.
Over shared memory these orders are equal. Over Gloo the trainer exchanges partials, adds them and gathers the sums.

several: four shards per worker, compared with four micro-batches of gradient accumulation (`no_sync`) under our and
torch's DistributedDataParallel; also the memory of a worker.

uneven: two workers, each on a core of its own, and another busy process on the core of worker 0. Compared are fixed
shards (`balance: even`), moving shards (`speed`), and torch's DistributedDataParallel on halves of the batch. Each
shard has so many samples that the overhead per shard is small.

Each round measures all sides of a part in the same processes. Figures are medians over the rounds of the
slowest rank's time per step. All loops read the loss, and use deterministic operators.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interleaved import attempt, private_bytes, return_large_blocks, run_round
from tables import NOISY_SPREAD, load_average, log, mark, print_row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset
from training_models import MODELS

import lockstep as ls
from lockstep.comm import current_world

SIDES = ("torch DDP, Gloo", "ls DDP, Gloo", "trainer, Gloo", "ls DDP, shm", "trainer, shm")
UNEVEN_SIDES = ("torch DDP, Gloo", "trainer, even", "trainer, speed")
NAMES = ("mlp", "transformer", "conv")
NUM_SHARDS_EACH = 4
"""Shards per worker where they run several."""
UNEVEN_SHARDS = 8
UNEVEN_COPIES = 4
"""A shard has so many batches of the model's."""
UNEVEN_STEPS = 8
WARM_UP_STEPS = 3
LEARNING_RATE = 1e-5
Loop = Callable[[], None]
"""Does one step."""


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch, as the trainer asks for it."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def samples(name: str, num_copies: int) -> TensorDataset:
    """Return so many batches of a model's as one data set."""
    torch.manual_seed(1)
    batches = [MODELS[name].make_batch() for _ in range(num_copies)]
    return TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))


def make_loop(side: str, name: str, run: ls.Run, num_shards_each: int) -> Loop:
    """Make one side's step (collective): as many samples per shard, or micro-batch, as the model's batch has."""
    wrapper, _, backend = side.partition(", ")
    group = dist.new_group(backend=backend.lower())
    model, optimizer = build(name)
    data = samples(name, num_shards_each * run.world_size)
    if wrapper == "trainer":
        world = current_world(group)
        num_shards = num_shards_each * run.world_size
        trainer = ls.Trainer(model, optimizer, loss=loss_of, num_shards=num_shards, world=world)
        loader = ls.ShardedLoader(data, batch_size=len(data), num_shards=num_shards, shuffle=False, world=world)
        batch = next(loader.epoch(0))
        warnings.filterwarnings("ignore", message="The batch is that of")  # the same batch in every step
        return partial(train_step, trainer, batch)
    if wrapper == "torch DDP":
        wrapped: nn.Module = TorchDDP(model, process_group=group, gradient_as_bucket_view=True)
    else:
        wrapped = ls.DistributedDataParallel(model, process_group=group)
    share = len(data) // run.world_size
    mine = [column[run.rank * share :][:share].chunk(num_shards_each) for column in data.tensors]
    return partial(accumulate, wrapped, optimizer, list(zip(*mine, strict=True)))


def train_step(trainer: ls.Trainer, batch: ls.ShardedBatch) -> None:
    """Do a step of a trainer, which reads the loss."""
    trainer.step(batch)


def accumulate(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
    """Do a step of several micro-batches."""
    optimizer.zero_grad()
    total = 0.0
    for number, batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            loss = loss_of(model, batch) / len(micro_batches)
            loss.backward()
        total += loss.item()
    optimizer.step()


def time_sides(run: ls.Run, name: str, num_shards_each: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds per step of the slowest rank, for every side and round (collective)."""
    loops = {side: make_loop(side, name, run, num_shards_each) for side in SIDES}
    steps = max(1, MODELS[name].steps // num_shards_each)

    def measure_side(side: str) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            loops[side]()
        return (time.perf_counter() - began) / steps

    for loop in loops.values():
        for _ in range(WARM_UP_STEPS):
            loop()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    errors: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(SIDES)
        run_round([*SIDES[first:], *SIDES[:first]], measure_side, seconds, errors)
    if errors:
        raise RuntimeError(str(errors))
    return seconds


def measure_memory(run: ls.Run, name: str, side: str, num_shards_each: int) -> float:
    """Return by how many bytes this worker grows at most in some steps (collective)."""
    return_large_blocks()
    rehearsal = make_loop(side, "tiny", run, num_shards_each)
    for _ in range(WARM_UP_STEPS):
        rehearsal()
    del rehearsal
    dist.barrier()
    before = highest = private_bytes()
    loop = make_loop(side, name, run, num_shards_each)

    def watch(*_: object) -> None:
        nonlocal highest
        highest = max(highest, private_bytes())

    watched = nn.modules.module.register_module_forward_hook(watch)
    for _ in range(WARM_UP_STEPS):
        loop()
        watch()
    watched.remove()
    dist.barrier()
    return float(highest - before)


# -- Uneven machines ---------------------------------------------------------------------------------------------------


def train_unevenly(run: ls.Run, name: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, str], list[int]]:
    """Return seconds per step, digests of the trainers and the shards of each worker at the end (collective)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[run.rank % len(cores)]})
    data = samples(name, UNEVEN_SHARDS * UNEVEN_COPIES * UNEVEN_STEPS)
    batch_size = len(data) // UNEVEN_STEPS
    trainers: dict[str, ls.Trainer] = {}
    loops: dict[str, Callable[[int], Any]] = {}
    for balance in ("even", "speed"):
        model, optimizer = build(name)
        trainer = ls.Trainer(model, optimizer, loss=loss_of, num_shards=UNEVEN_SHARDS, balance=balance)
        loader = ls.ShardedLoader(data, batch_size=batch_size, num_shards=UNEVEN_SHARDS, shuffle=False)
        trainers[f"trainer, {balance}"] = trainer
        loops[f"trainer, {balance}"] = partial(train_epoch, trainer, loader)
    model, optimizer = build(name)
    wrapped = TorchDDP(model, process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=True)
    half = [column.chunk(UNEVEN_STEPS * run.world_size)[run.rank :: run.world_size] for column in data.tensors]
    batches = list(zip(*half, strict=True))

    def train_wrapped(_epoch: int) -> list[int]:
        for batch in batches:
            accumulate(wrapped, optimizer, [batch])
        return []

    loops["torch DDP, Gloo"] = train_wrapped
    seconds: dict[str, list[float]] = {side: [] for side in UNEVEN_SIDES}
    shards: list[int] = []

    def measure_side(side: str, epoch: int) -> float:
        nonlocal shards
        began = time.perf_counter()
        found = loops[side](epoch)
        if side == "trainer, speed":
            shards = found
        return (time.perf_counter() - began) / UNEVEN_STEPS

    for epoch in range(rounds + 1):
        for side in UNEVEN_SIDES:
            dist.barrier()
            spent, error = attempt(partial(measure_side, side, epoch))
            if error:
                raise RuntimeError(f"{side}: {error}")
            if epoch > 0:  # shards are moved in the first epoch
                seconds[side].append(spent)
    return seconds, {side: trainer.digest() for side, trainer in trainers.items()}, shards


def train_epoch(trainer: ls.Trainer, loader: ls.ShardedLoader, epoch: int) -> list[int]:
    """Train for an epoch; return how many shards each worker ran in its last step."""
    shards: list[int] = []
    for batch in loader.epoch(epoch):
        trainer.step(batch)
        shards = [len(owned) for owned in batch.ranges]
    return shards


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keep a core busy with another process."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# -- Tables ------------------------------------------------------------------------------------------------------------


def show_ratio(seconds: dict[str, list[float]], side: str, other: str) -> str:
    """Show the ratio of two medians."""
    ours, theirs = seconds[side], seconds[other]
    return f"{mark(ours, theirs)}{statistics.median(ours) / statistics.median(theirs):.2f}"


def show_milliseconds(samples: list[float]) -> str:
    """Show a median."""
    return f"{mark(samples)}{1000 * statistics.median(samples):.1f}"


def print_steps(num_shards_each: int, worlds: list[int], rounds: int) -> None:
    """Print times of a step with so many shards per worker."""
    ratios = (
        *(("trainer, shm", "ls DDP, shm"), ("trainer, Gloo", "ls DDP, Gloo")),
        *(("trainer, shm", "torch DDP, Gloo"), ("trainer, Gloo", "torch DDP, Gloo")),
    )
    print_row("model", "workers", *SIDES, *(f"{one} / {other}" for one, other in ratios))
    print_row(*["---"] * (2 + len(SIDES) + len(ratios)))
    for world in worlds:
        for name in NAMES:
            log(f"{num_shards_each} shards per worker, {world} workers, {name} ...")
            seconds = ls.launch(time_sides, name, num_shards_each, rounds, devices=f"cpu:{world}")[0]
            print_row(
                *(MODELS[name].title, str(world), *(show_milliseconds(seconds[side]) for side in SIDES)),
                *(show_ratio(seconds, *pair) for pair in ratios),
            )


def print_memory(num_shards_each: int) -> None:
    """Print the memory of a worker of two, in MiB and in gradients."""
    model = MODELS["mlp"].build()
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    limit = math.ceil(math.log2(num_shards_each)) + 1
    print(
        f"\nHighest memory of a worker of 2 beyond that before the model was made, MLP, MiB; a gradient is "
        f"{gradient / (1 << 20):.1f} MiB, and {num_shards_each} shards should need at most {limit} of them.\n"
    )
    print_row(*SIDES)
    print_row(*["---"] * len(SIDES))
    figures = []
    for side in SIDES:
        log(f"memory, {side} ...")
        found = ls.launch(measure_memory, "mlp", side, num_shards_each, devices="cpu:2")
        figures.append(f"{statistics.mean(found) / (1 << 20):.1f}")
    print_row(*figures)


def print_uneven(rounds: int) -> None:
    """Print how fast two workers are of which one has to share its core."""
    titles = (f"{side}, samples/s" for side in UNEVEN_SIDES)
    print_row("model", *titles, "speed / even", "speed / torch", "shards", "digests")
    print_row(*["---"] * (len(UNEVEN_SIDES) + 5))
    for name in ("conv", "transformer"):
        log(f"uneven machine, {name} ...")
        num_samples = len(samples(name, UNEVEN_SHARDS * UNEVEN_COPIES))
        with busy_core(min(os.sched_getaffinity(0))):
            seconds, digests, shards = ls.launch(train_unevenly, name, rounds, devices="cpu:2")[0]
        rates = {side: num_samples / statistics.median(spent) for side, spent in seconds.items()}
        print_row(
            MODELS[name].title,
            *(f"{mark(seconds[side])}{rates[side]:.1f}" for side in UNEVEN_SIDES),
            f"{rates['trainer, speed'] / rates['trainer, even']:.2f}",
            f"{rates['trainer, speed'] / rates['torch DDP, Gloo']:.2f}",
            " + ".join(map(str, shards)),
            "equal" if len(set(digests.values())) == 1 else "NOT equal",
        )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: list(map(int, text.split(","))), default=[2, 4])
    parser.add_argument("--rounds", type=int, default=11, help="measurements per side; default 11")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["each", "several", "uneven"])
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its tables in Markdown."""
    options = parse_options()
    os.environ.setdefault("LOCKSTEP_CHECK", "0")  # else torch would be timed on groups of ours, which compare calls
    began = time.monotonic()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, one thread per "
        f"worker; load average before the run {load_average()}\n\n~: quartiles further apart than "
        f"{NOISY_SPREAD:.0%} of the median.\n"
    )
    if "each" in options.parts:
        print("Time of a step in ms, one shard per worker\n")
        print_steps(1, options.worlds, options.rounds)
    if "several" in options.parts:
        print(f"\nTime of a step in ms, {NUM_SHARDS_EACH} shards, or micro-batches, per worker\n")
        print_steps(NUM_SHARDS_EACH, options.worlds, options.rounds)
        print_memory(NUM_SHARDS_EACH)
    if "uneven" in options.parts:
        print(f"\nTwo workers of which one shares its core, {UNEVEN_SHARDS} shards\n")
        print_uneven(options.rounds)
    print(f"\nLoad average after the run {load_average()}; it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
