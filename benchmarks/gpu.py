"""Time of a training step on one GPU: our DistributedDataParallel and Trainer against torch's and a plain loop.

    python benchmarks/gpu.py [--models resnet,gpt,tiny] [--compile] [--deterministic] [--rounds 9] [--record FILE]
    python benchmarks/gpu.py --summary FILE

All sides train the same model in one process, in a group of one over NCCL, in turn, a few steps each, round after
round, so that whatever else the machine does hits each alike; each round begins with another side. A turn ends when
the device has done all of it. A figure is the median over the rounds of the time per step; "host" is how long the host
needed to launch the steps, which shows where it is what all wait for. A batch is copied from pinned memory in every
step.

Determinism is set for a whole process, so its cost is found by comparing two runs: each writes its times to a file
(--record), of which --summary makes the tables of goals and of what determinism costs. --fill-cache only compiles.

Exit code 3: a goal was missed.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_device import empty_cache, name, synchronize
from gpu_models import Case, cases
from gpu_sides import DDP, PLAIN, SIDES, TORCH, TRAINER, Step, make_step
from gpu_workers import join_alone
from tables import NOISY_SPREAD, load_average, log, mark, print_row

import lockstep as ls

WARM_UP_STEPS = 4
"""Both reducers arrange their buckets anew after the first step; the allocator has all it needs after some."""
LEAST_ROUNDS = 5
MISSED = 3
"""Exit code where everything ran and a goal was missed."""
GOALS = {
    # side, the side to compare with: the highest ratio by model
    (DDP, TORCH): {"resnet": 1.00, "gpt": 1.00, "tiny": 1.05},
    (TRAINER, PLAIN): {"resnet": 1.02, "gpt": 1.02, "tiny": 1.02},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What was measured with one model in one process."""

    model: str
    is_compiled: bool
    deterministic: bool
    seconds: dict[str, list[float]]
    """Per step, by side; one for each round."""
    host_seconds: dict[str, list[float]]
    """Until the host had launched it."""
    errors: dict[str, str]
    """What went wrong, by side."""

    def ratio(self, side: str, other: str) -> float | None:
        if not self.seconds.keys() >= {side, other}:
            return None
        return statistics.median(self.seconds[side]) / statistics.median(self.seconds[other])


def make_sides(case: Case, *, is_compiled: bool, deterministic: bool) -> tuple[dict[str, Step], dict[str, str]]:
    """Return what does a step, by side, after its warm-up; and errors, also by side."""
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for side in SIDES:
        try:
            began = time.perf_counter()
            step = make_step(side, case, compile_mode="default" if is_compiled else None, deterministic=deterministic)
            for _ in range(WARM_UP_STEPS):
                step()
            synchronize()
            steps[side] = step
            log(f"    {side}: ready after {time.perf_counter() - began:.1f} s")
        except Exception as error:  # noqa: BLE001 - the other sides are timed all the same
            traceback.print_exc()
            errors[side] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return steps, errors


def time_case(model: str, case: Case, options: argparse.Namespace) -> Times:
    """Time all sides with one model."""
    log(f"{case.title}{', compiled' * options.compile}{', deterministic' * options.deterministic} ...")
    steps, errors = make_sides(case, is_compiled=options.compile, deterministic=options.deterministic)
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    host: dict[str, list[float]] = {side: [] for side in steps}
    began = time.monotonic()
    gc.collect()
    for number in range(0 if options.fill_cache else options.rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > began + options.seconds:
            break
        first = number % len(SIDES)
        for side in filter(steps.__contains__, [*SIDES[first:], *SIDES[:first]]):
            synchronize()
            start = time.perf_counter()
            for _ in range(case.steps):
                steps[side]()
            host[side].append((time.perf_counter() - start) / case.steps)
            synchronize()
            seconds[side].append((time.perf_counter() - start) / case.steps)
    return Times(
        model=model,
        is_compiled=options.compile,
        deterministic=options.deterministic,
        seconds={side: each for side, each in seconds.items() if each},
        host_seconds=host,
        errors=errors,
    )


def show_time(times: Times, side: str) -> str:
    if side in times.errors:
        return f"error: {times.errors[side][:60]}".replace("|", "/")
    if side not in times.seconds:
        return "-"
    whole, host = times.seconds[side], times.host_seconds[side]
    return f"{mark(whole)}{1000 * statistics.median(whole):.2f} (host {1000 * statistics.median(host):.2f})"


def show_ratio(times: Times, side: str, other: str) -> str:
    ratio = times.ratio(side, other)
    return "-" if ratio is None else f"{mark(times.seconds[side], times.seconds[other])}{ratio:.3f}"


def print_times(all_times: list[Times], titles: dict[str, str]) -> None:
    """Print one row for each model."""
    ratios = (*GOALS, (TRAINER, DDP), (TORCH, PLAIN))
    print_row(
        "model", "compiled", "deterministic", *(f"{side}, ms" for side in SIDES), *(f"{a} / {b}" for a, b in ratios)
    )
    print_row(*["---"] * (3 + len(SIDES) + len(ratios)))
    for times in all_times:
        print_row(
            *(titles[times.model], "yes" if times.is_compiled else "no", "yes" if times.deterministic else "no"),
            *(show_time(times, side) for side in SIDES),
            *(show_ratio(times, *pair) for pair in ratios),
        )


def find_missed(all_times: list[Times]) -> list[str]:
    """Return which goals were missed, and which sides failed."""
    missed = []
    for times in all_times:
        setting = f"{times.model}{', compiled' * times.is_compiled}{', deterministic' * times.deterministic}"
        missed += [f"{setting}: {side} failed: {error}" for side, error in times.errors.items()]
        for (side, other), limits in GOALS.items():
            ratio = times.ratio(side, other)
            if ratio is not None and ratio > limits[times.model]:
                missed.append(f"{setting}: {side} / {other} is {ratio:.3f}, the goal is {limits[times.model]:.2f}")
    return missed


def print_cost_of_determinism(all_times: list[Times], titles: dict[str, str]) -> None:
    print("\nTime of a deterministic step, in units of one that is not (two processes)\n")
    print_row("model", "compiled", *SIDES)
    print_row(*["---"] * (2 + len(SIDES)))
    found = {(times.model, times.is_compiled, times.deterministic): times for times in all_times}
    for (model, is_compiled, deterministic), times in found.items():
        free = found.get((model, is_compiled, False))
        if deterministic and free is not None:
            cells = [
                f"{statistics.median(times.seconds[side]) / statistics.median(free.seconds[side]):.3f}"
                if side in times.seconds and side in free.seconds
                else "-"
                for side in SIDES
            ]
            print_row(titles[model], "yes" if is_compiled else "no", *cells)


def summarize(path: Path, titles: dict[str, str]) -> None:
    """Print all tables of a file of times; exit with the goals that were missed."""
    all_times = [Times(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    print_times(all_times, titles)
    print_cost_of_determinism(all_times, titles)
    missed = find_missed(all_times)
    print("\ngoals that were missed:\n    " + "\n    ".join(missed or ["none"]), flush=True)
    if not all_times:
        sys.exit("There are no times.")
    sys.exit(MISSED if missed else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["resnet", "gpt", "tiny"])
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--deterministic", action="store_true", help="with deterministic operators")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each side; default 11")
    parser.add_argument("--seconds", type=float, default=15.0, help=f"after {LEAST_ROUNDS} rounds no more than that")
    parser.add_argument("--fill-cache", action="store_true", help="compile, and time nothing")
    parser.add_argument("--record", type=Path, help="append the times to this file")
    parser.add_argument("--summary", type=Path, help="print the tables of such a file")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    known = cases(is_small=options.small)
    titles = {model: case.title for model, case in known.items()}
    if options.summary:
        summarize(options.summary, titles)
        return
    print(
        f"{name()}, torch {torch.__version__}, up to {options.rounds} rounds; load average {load_average()}; "
        f"~: quartiles further apart than {NOISY_SPREAD:.0%} of the median\n"
    )
    ls.set_deterministic(options.deterministic)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    join_alone()
    found = []
    for model in options.models:
        times = time_case(model, known[model], options)
        found.append(times)
        if options.record:
            with options.record.open("a") as stream:
                stream.write(json.dumps(asdict(times)) + "\n")
        torch.compiler.reset()
        gc.collect()
        empty_cache()
    print_times(found, titles)
    if any(times.errors for times in found):
        sys.exit(
            "\n".join(f"{times.model}, {side}: {error}" for times in found for side, error in times.errors.items())
        )


if __name__ == "__main__":
    main()
