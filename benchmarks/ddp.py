"""Time and memory of a training step under Lockstep's DistributedDataParallel and torch's, on Gloo and shared memory.

    make bench-ddp        or: python benchmarks/ddp.py [--models mlp,transformer,conv,tiny] [--optimizers sgd,adamw]
                                                       [--worlds 2,4] [--sides alone,torch-gloo,...] [--rounds 15]
                                                       [--steps 5] [--skip-memory]

Time. All sides train the same model in the same processes. Each round measures a few steps of every side, so that
noise affects all sides equally; each round starts with another side. A figure is the median over the
rounds of the slowest rank's time per step. What communication adds is the median of the differences to "alone", the
plain module without communication, in the same round. Before a side is timed, its first gradients are compared with
the mean of the plain module's over all ranks.

    launcher                             rank 0 .. n-1, one launch for a world
    --------                             -------------------------------------
    1 launch                        ->   per model and optimizer: build the sides, check them, warm them up
    2                                    a round: barrier, one side's steps, exchange of times and errors; next side
    3 one row for each line         <-   rank 0 writes a line of JSON for each model and optimizer

A side that raises an error on any rank is left out afterwards, on all ranks. Each side of each model has a group
of its own, so that an error of one side does not affect the others.

Memory. Each side has new processes. The figure is `Pss_Anon` + `Pss_Shmem` of /proc/self/smaps_rollup. Resident size
would count a shared page in every process that maps it, and so the buckets of other ranks, which are
read in place, in this worker. With PSS, a page that n processes map counts as 1/n in each, and the sum over
the workers is the memory of the machine. Mapped files, such as code, do not count. It is sampled after
wrapping, after every forward, when each gradient has been accumulated, after every backward and every update, from the
first step on. Shown is the maximum minus the value before the model was created, as the mean over the workers.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import attempt, private_bytes, return_large_blocks, run_round
from tables import NOISY_SPREAD, load_average, log, mark, print_row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_models import MODELS, Model

import lockstep as ls

ALONE = "alone"
TORCH_GLOO = "torch-gloo"
LOCKSTEP_GLOO = "lockstep-gloo"
LOCKSTEP_SHM = "lockstep-shm"
SIDES = {
    ALONE: "alone",
    TORCH_GLOO: "torch, Gloo",
    "torch-shm": "torch, shm",
    LOCKSTEP_GLOO: "Lockstep, Gloo",
    LOCKSTEP_SHM: "Lockstep, shm",
}
LEARNING_RATE = 1e-5
"""So small that the model, which sees one batch again and again, does not become another one while it is timed."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=LEARNING_RATE),
    "adamw": partial(
        torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    ),  # not fused, it takes longer than the rest of the step
}
TITLES = {"sgd": "SGD", "adamw": "AdamW"}
WARM_UP_STEPS = 3
"""Both libraries arrange their buckets anew after the first step."""
TOLERANCE = 1e-4
"""How far a gradient may be from what it should be, in units of the largest one."""
LEAST_ROUNDS = 5
CASE_SECONDS = 30.0
"""A model gets fewer rounds than asked for, though not fewer than `LEAST_ROUNDS`, where they would take longer."""
PATIENCE = timedelta(seconds=60)
"""How long a rank waits for one that has failed."""
MEMORY_STEPS = 4
MEMORY_WORLD = 2
MIB = 1 << 20
SHORTEST_DIFFERENCE = 1e-5
"""Where communication adds less, in seconds, there is nothing to take a share of."""
ERROR_LENGTH = 60
"""So much of an error goes into a cell; all of it goes to stderr."""


MEMORY_MODELS = ("mlp", "transformer")


# -- In the workers ----------------------------------------------------------------------------------------------------


class Contender:
    """One side with its own copy of the model.

    Args:
        side: Which.
        model: What it trains.
        optimizer: With which optimizer.
        watch: Called at the moments at which memory is looked at.
    """

    def __init__(
        self, side: str, model: Model, optimizer: str, rank: int, watch: Callable[[], None] | None = None
    ) -> None:
        self._watch = watch
        torch.manual_seed(0)
        self.module = model.build()
        torch.manual_seed(1 + rank)
        self.inputs, self.targets = model.make_batch()
        wrapper, _, backend = side.partition("-")
        self._group = dist.new_group(backend=backend, timeout=PATIENCE) if backend else None
        self._wrapped = self.module
        if wrapper == "torch":
            self._wrapped = TorchDDP(self.module, process_group=self._group, gradient_as_bucket_view=True)
        elif wrapper == "lockstep":
            self._wrapped = ls.DistributedDataParallel(self.module, process_group=self._group)
        self._optimizer = OPTIMIZERS[optimizer](self._wrapped.parameters())

    def compute_gradients(self) -> None:
        self._optimizer.zero_grad()
        outputs = self._wrapped(self.inputs)
        if self._watch is not None:
            self._watch()
        nn.functional.cross_entropy(outputs.flatten(0, -2), self.targets.flatten()).backward()

    def train(self, steps: int) -> None:
        """Do some steps."""
        for _ in range(steps):
            self.compute_gradients()
            if self._watch is not None:
                self._watch()
            self._optimizer.step()
            if self._watch is not None:
                self._watch()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def leave(self) -> None:
        """Let go of the group, broken or not."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What was measured with one model and optimizer in one world."""

    world: int
    model: str
    optimizer: str
    num_parameters: int
    """How many numbers the model has."""
    seconds: dict[str, list[float]]
    """Seconds per step of the slowest rank, by side; one for each round."""
    errors: dict[str, str]
    """What went wrong, by side."""


def time_world(
    run: ls.Run, cases: Sequence[tuple[str, str]], sides: Sequence[str], rounds: int, steps: int | None, path: str
) -> None:
    """Time every model and optimizer; rank 0 writes a line for each to `path`."""
    # The plain module of "alone" is trained beside the wrapped ones, and by each rank on its own.
    warnings.filterwarnings("ignore", message="A parameter that is trained")
    for name, optimizer in cases:
        if run.rank == 0:
            log(f"{run.world_size} workers, {MODELS[name].title}, {TITLES[optimizer]} ...")
        times = time_case(run, name, optimizer, sides, rounds, steps or MODELS[name].steps)
        if run.rank == 0:
            with Path(path).open("a") as stream:
                stream.write(json.dumps(asdict(times)) + "\n")


def time_case(run: ls.Run, name: str, optimizer: str, sides: Sequence[str], rounds: int, steps: int) -> Times:
    """Time all sides with one model and optimizer (collective)."""
    model = MODELS[name]
    truth = mean_gradients(model, run.rank)
    contenders: dict[str, Contender] = {}
    errors: dict[str, str] = {}

    def set_up(side: str) -> float:
        contender = contenders[side] = Contender(side, model, optimizer, run.rank)
        contender.compute_gradients()
        if side != ALONE:
            check(contender.gradients(), truth)
        contender.train(WARM_UP_STEPS)
        return 0.0

    def measure_side(side: str) -> float:
        began = time.perf_counter()
        contenders[side].train(steps)
        return (time.perf_counter() - began) / steps

    for side in sides:
        _, error = attempt(partial(set_up, side))
        if error:
            errors[side] = error
    gc.collect()
    seconds: dict[str, list[float]] = {side: [] for side in sides if side not in errors}
    began = time.monotonic()
    for number in range(rounds):
        # The maximum over ranks, so that all ranks stop after the same round.
        if number >= LEAST_ROUNDS and attempt(lambda: time.monotonic() - began)[0] > CASE_SECONDS:
            break
        first = number % len(sides)
        run_round([*sides[first:], *sides[:first]], measure_side, seconds, errors)
    for contender in contenders.values():
        contender.leave()
    num_parameters = sum(gradient.numel() for gradient in truth)
    return Times(
        world=run.world_size,
        model=name,
        optimizer=optimizer,
        num_parameters=num_parameters,
        seconds=seconds,
        errors=errors,
    )


def mean_gradients(model: Model, rank: int) -> list[Tensor]:
    """Return the mean over all ranks of the plain module's gradients (collective)."""
    plain = Contender(ALONE, model, "sgd", rank)
    plain.compute_gradients()
    gradients = plain.gradients()
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return gradients


def check(found: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Refuse gradients that are not those of all ranks: their times would mean nothing."""
    largest = max(float(right.abs().max()) for right in truth)
    off = max((float((one - right).abs().max()) for one, right in zip(found, truth, strict=True)), default=0.0)
    if not off <= TOLERANCE * largest:
        raise RuntimeError(f"gradients are off by {off / largest:.1%} of the largest one.")


def measure_memory(run: ls.Run, name: str, side: str) -> float:
    """Return by how many bytes this worker grows at most (collective)."""
    return_large_blocks()
    # Memory for imports and one-time initialization is not counted.
    rehearsal = Contender(side, MODELS["tiny"], "sgd", run.rank)
    rehearsal.train(MEMORY_STEPS)
    rehearsal.leave()
    del rehearsal
    gc.collect()
    dist.barrier()
    before = private_bytes()
    highest = before

    def watch(*_: object) -> None:
        nonlocal highest
        highest = max(highest, private_bytes())

    contender = Contender(side, MODELS[name], "sgd", run.rank, watch)
    watch()
    for parameter in contender.module.parameters():
        parameter.register_post_accumulate_grad_hook(watch)
    contender.train(MEMORY_STEPS)
    dist.barrier()
    return float(highest - before)


# -- In the launcher ---------------------------------------------------------------------------------------------------


def launch_world(
    world: int, cases: Sequence[tuple[str, str]], sides: Sequence[str], rounds: int, steps: int | None
) -> Iterator[Times]:
    """Time everything in a world of new workers; what is missing at the end, because they died, has their error."""
    error = "no result"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "times"
        path.touch()
        try:
            ls.launch(time_world, cases, sides, rounds, steps, str(path), devices=f"cpu:{world}")
        except ls.WorkerFailedError as failed:
            error = str(failed).partition("\n")[0]
            log(str(failed))
        done = [Times(**json.loads(line)) for line in path.read_text().splitlines()]
    yield from done
    for name, optimizer in cases[len(done) :]:
        errors = dict.fromkeys(sides, error)
        yield Times(world=world, model=name, optimizer=optimizer, num_parameters=0, seconds={}, errors=errors)


def launch_memory(name: str, sides: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return bytes by side, or what went wrong, also by side."""
    found, errors = {}, {}
    for side in sides:
        log(f"memory, {MODELS[name].title}, {SIDES[side]} ...")
        try:
            found[side] = statistics.mean(ls.launch(measure_memory, name, side, devices=f"cpu:{MEMORY_WORLD}"))
        except ls.WorkerFailedError as failed:
            errors[side] = str(failed).partition("\n")[0]
            log(str(failed))
    return found, errors


def show_time(times: Times, side: str) -> str:
    if side in times.errors:
        return show_error(times.errors[side])
    samples = times.seconds[side]
    return f"{mark(samples)}{1000 * statistics.median(samples):.2f}"


def show_error(error: str) -> str:
    return f"error: {error[:ERROR_LENGTH]}".replace("|", "/")


def show_ratio(times: Times, side: str, other: str) -> str:
    if not times.seconds.keys() >= {side, other}:
        return "-"
    ours, theirs = times.seconds[side], times.seconds[other]
    return f"{mark(ours, theirs)}{statistics.median(ours) / statistics.median(theirs):.2f}"


def show_share(times: Times) -> str:
    """Show what communication adds with Lockstep on shm, in units of what it adds with torch on Gloo."""
    if not times.seconds.keys() >= {ALONE, TORCH_GLOO, LOCKSTEP_SHM}:
        return "-"
    ours, theirs = (
        [taken - least for taken, least in zip(times.seconds[side], times.seconds[ALONE], strict=True)]
        for side in (LOCKSTEP_SHM, TORCH_GLOO)
    )
    if statistics.median(theirs) < SHORTEST_DIFFERENCE:
        return "-"
    return f"{mark(ours, theirs)}{statistics.median(ours) / statistics.median(theirs):.2f}"


def print_times(all_times: Iterable[Times], sides: Sequence[str]) -> None:
    """Print the first table, row by row."""
    ratios = ("Lockstep on shm / torch on Gloo", "Lockstep on Gloo / torch on Gloo", "added: Lockstep shm / torch Gloo")
    print_row("model", "optimizer", "workers", *(SIDES[side] for side in sides), *ratios)
    print_row(*["---"] * (3 + len(sides) + len(ratios)))
    for times in all_times:
        size = f", {times.num_parameters / 1e6:.2g} M" if times.num_parameters else ""
        print_row(
            *(MODELS[times.model].title + size, TITLES[times.optimizer], str(times.world)),
            *(show_time(times, side) for side in sides),
            show_ratio(times, LOCKSTEP_SHM, TORCH_GLOO),
            show_ratio(times, LOCKSTEP_GLOO, TORCH_GLOO),
            show_share(times),
        )


def print_memory(names: Iterable[str], sides: Sequence[str]) -> None:
    """Print the second table, row by row."""
    print_row("model", *(SIDES[side] for side in sides), "Lockstep on shm / torch on Gloo")
    print_row(*["---"] * (2 + len(sides)))
    for name in names:
        found, errors = launch_memory(name, sides)
        figures = [f"{found[side] / MIB:.1f}" if side in found else show_error(errors[side]) for side in sides]
        has_both = found.keys() >= {LOCKSTEP_SHM, TORCH_GLOO}
        ratio = f"{found[LOCKSTEP_SHM] / found[TORCH_GLOO]:.2f}" if has_both else "-"
        print_row(MODELS[name].title, *figures, ratio)


def parse_options() -> argparse.Namespace:
    def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
        names = list(known)

        def choose(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in names]:
                raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(names)}.")
            return [name for name in names if name in chosen]

        return choose

    def above_zero(text: str) -> int:
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero.")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, known in (("models", MODELS), ("optimizers", OPTIMIZERS), ("sides", SIDES)):
        parser.add_argument(f"--{option}", type=some_of(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument(
        "--worlds",
        type=lambda text: [above_zero(world) for world in text.split(",")],
        default=[2, 4],
        help="numbers of workers; default 2,4",
    )
    parser.add_argument("--rounds", type=above_zero, default=15, help="measurements per side, at most; default 15")
    parser.add_argument("--steps", type=above_zero, help="steps per turn; by default it depends on the model")
    parser.add_argument("--skip-memory", action="store_true", help="measure times only")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its tables in Markdown."""
    options = parse_options()
    os.environ.setdefault("LOCKSTEP_CHECK", "0")  # else torch would be timed on groups of ours, which compare calls
    began = time.monotonic()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, one thread per "
        f"worker; load average before the run {load_average()}\n"
    )
    cases = [
        (name, optimizer)
        for name in options.models
        for optimizer in MODELS[name].optimizers
        if optimizer in options.optimizers
    ]
    print(
        f"Time of a step in ms, up to {options.rounds} rounds. ~: quartiles further apart than {NOISY_SPREAD:.0%} of "
        "the median.\n"
    )
    worlds = (launch_world(world, cases, options.sides, options.rounds, options.steps) for world in options.worlds)
    print_times((times for world in worlds for times in world), options.sides)
    if not options.skip_memory:
        print(f"\nHighest memory of a worker beyond that before the model was made, MiB; {MEMORY_WORLD} workers, SGD\n")
        print_memory([name for name in options.models if name in MEMORY_MODELS], options.sides)
    print(f"\nLoad average after the run {load_average()}; it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
