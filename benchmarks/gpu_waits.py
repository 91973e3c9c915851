"""How often the host waits for the GPU in a steady step.

Counted in two ways: warnings of `torch.cuda.set_sync_debug_mode("warn")`, with the line from which they come, and the
calls of CUDA that wait, as the profiler saw them. Neither sees what NCCL's own threads do. A row is compared with the
plain loop or torch's DistributedDataParallel in the row before that does the same work; a group of one, over NCCL.

Exit code 3: there is a wait that the row to compare with does not have.
"""

import argparse
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_device import activities, name, synchronize, warnings_of_waits
from gpu_models import cases
from gpu_sides import DDP, PLAIN, TORCH, TRAINER, Step, make_step
from gpu_workers import join_alone
from tables import print_row

WARM_UP_STEPS = 4
NUM_STEPS = 5
PROFILED_STEPS = 2
"""Fewer, for the profiler takes its time."""
MISSED = 3
"""Exit code where everything ran and a goal was missed."""
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")

ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    # title, side, the row to compare with, options
    ("plain loop", PLAIN, "", {}),
    ("plain loop, clipping", PLAIN, "", {"max_grad_norm": 1.0}),
    ("plain loop, GradScaler", PLAIN, "", {"has_scaler": True}),
    ("torch DDP", TORCH, "plain loop", {}),
    ("torch DDP, clipping", TORCH, "plain loop, clipping", {"max_grad_norm": 1.0}),
    ("torch DDP, 4 micro-batches", TORCH, "plain loop", {"num_shards": 4}),
    ("ls DDP", DDP, "torch DDP", {}),
    ("ls DDP, clipping", DDP, "torch DDP, clipping", {"max_grad_norm": 1.0}),
    ("ls DDP, 4 micro-batches", DDP, "torch DDP, 4 micro-batches", {"num_shards": 4}),
    ("ls Trainer", TRAINER, "plain loop", {}),
    ("ls Trainer, clipping", TRAINER, "plain loop, clipping", {"max_grad_norm": 1.0}),
    ("ls Trainer, GradScaler", TRAINER, "plain loop, GradScaler", {"has_scaler": True}),
    ("ls Trainer, 4 shards", TRAINER, "plain loop", {"num_shards": 4}),
)


@dataclass(slots=True)
class Waits:
    """What was seen."""

    warned: Counter[str] = field(default_factory=Counter)
    """Warnings by the line of code, in `NUM_STEPS` steps."""
    called: Counter[str] = field(default_factory=Counter)
    """Calls of CUDA by name, in `PROFILED_STEPS` steps."""

    def per_step(self) -> tuple[float, float]:
        return self.warned.total() / NUM_STEPS, self.called.total() / PROFILED_STEPS


def find_line() -> str:
    """Return the innermost line of Lockstep in the stack, else of a benchmark, else of torch."""
    frames = traceback.extract_stack()[:-2]
    for part in ("lockstep", "benchmarks"):
        mine = [frame for frame in frames if part in Path(frame.filename).parts and frame.filename != __file__]
        if mine:
            path = Path(mine[-1].filename)
            return f"{path.parent.name}/{path.name}:{mine[-1].lineno} {mine[-1].line}"
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def count(step: Step) -> Waits:
    """Count the waits of a side that has warmed up."""
    found = Waits()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" in str(message):
            found.warned[find_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        with warnings_of_waits():
            for _ in range(NUM_STEPS):
                step()
    synchronize()
    with torch.profiler.profile(activities=activities()) as profile:
        for _ in range(PROFILED_STEPS):
            step()
    # The profiler itself waits once for the device when it ends.
    found.called.update({event.key: event.count for event in profile.key_averages() if event.key in WAITING_CALLS})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    parser.parse_args()
    join_alone()
    case = cases(is_small=True)["resnet"]  # with BatchNorm, whose buffers travel too; waits do not depend on the size
    print(f"{name()}, {case.title}; per step, over {NUM_STEPS} steps after {WARM_UP_STEPS}\n")
    print_row("side", "warnings", "waiting calls of CUDA", "compared with", "result")
    print_row(*["---"] * 5)
    found: dict[str, Waits] = {}
    missed, failed = [], []
    for title, side, reference, arguments in ROWS:
        try:
            step = make_step(side, case, **arguments)
            for _ in range(WARM_UP_STEPS):
                step()
            synchronize()
            found[title] = count(step)
        except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
            traceback.print_exc()
            failed.append(title)
            print_row(title, "-", "-", reference, f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        warned, called = found[title].per_step()
        result = ""
        if reference in found:
            allowed, _ = found[reference].per_step()
            result = "no more" if warned <= allowed else "MORE"
            missed += [title] if warned > allowed else []
        print_row(title, f"{warned:.1f}", f"{called:.1f}", reference, result)
    for title, waits in found.items():
        print(f"\n{title}:")
        for kind, num_steps in ((waits.warned, NUM_STEPS), (waits.called, PROFILED_STEPS)):
            for place, number in kind.most_common():
                print(f"    {number / num_steps:.1f}  {place}")
    if failed:
        raise SystemExit(f"\nfailed: {', '.join(failed)}")
    if missed:
        print(f"\nmore waits than what they are compared with: {', '.join(missed)}", flush=True)
        sys.exit(MISSED)


if __name__ == "__main__":
    main()
