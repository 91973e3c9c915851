"""Where the time of a step goes: a summary of torch.profiler over 20 steps of each side, and one trace as a file.

"busy" is the time of all kernels and copies of a step, in units of the step's time as the profiler slows it down.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_device import IS_CUDA, activities, name, synchronize
from gpu_models import cases
from gpu_sides import SIDES, TRAINER, Step, make_step
from gpu_workers import join_alone
from tables import print_row
from torch.autograd import DeviceType

WARM_UP_STEPS = 4
TRACE_STEPS = 3
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
EVENTS = ("cudaEventRecord", "cudaEventRecordWithFlags")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
NUM_ROWS = 15
UNIT = 1000.0
"""The profiler counts microseconds."""


def profile(step: Step, num_steps: int) -> tuple[float, Any]:
    """Return seconds per step and the profile."""
    synchronize()
    with torch.profiler.profile(activities=activities()) as found:
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        seconds = time.perf_counter() - began
    return seconds / num_steps, found


def count(events: Any, names: Sequence[str], num_steps: int) -> float:
    return sum(float(event.count) for event in events if event.key in names) / num_steps


def on_device(events: Any) -> list[Any]:
    """Return the kernels and copies, without the ranges that hold several of them."""
    return [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def show_top(events: Any, num_steps: int) -> None:
    """Print the kernels, or without a GPU the operators, that take most of a step."""
    rows = [(event.self_device_time_total, event) for event in on_device(events)]
    rows = rows or [(event.self_cpu_time_total, event) for event in events]
    for spent, event in sorted(rows, key=lambda row: -row[0])[:NUM_ROWS]:
        print(f"    {spent / num_steps / UNIT:9.3f} ms {event.count / num_steps:8.1f} times  {event.key[:110]}")


def show_host(events: Any, num_steps: int) -> None:
    """Print what takes most of the host's time."""
    rows = sorted(events, key=lambda event: -event.self_cpu_time_total)[:NUM_ROWS]
    for event in rows:
        spent = event.self_cpu_time_total / num_steps / UNIT
        print(f"    {spent:9.3f} ms {event.count / num_steps:8.1f} times  {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt", "resnet", "tiny"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--trace", type=Path, help="write a trace of the trainer with the first model here, as .json.gz"
    )
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    options = parser.parse_args()
    num_steps = 2 if options.small else options.steps
    print(f"{name()}, {num_steps} steps\n")
    join_alone()
    known = cases(is_small=options.small)
    details: list[tuple[str, Any]] = []
    print_row("model", "side", "step, ms", "busy", "launches", "copies", "events", "waits")
    print_row(*["---"] * 8)
    for model in options.models:
        for side in SIDES:
            step = make_step(side, known[model])
            for _ in range(WARM_UP_STEPS):
                step()
            seconds, found = profile(step, num_steps)
            events = found.key_averages()
            kernels = sum(event.self_device_time_total for event in on_device(events))
            print_row(
                *(known[model].title, side, f"{1000 * seconds:.2f}"),
                f"{kernels / num_steps / (1e6 * seconds):.0%}" if IS_CUDA else "-",
                f"{count(events, LAUNCHES, num_steps):.0f}",
                f"{count(events, COPIES, num_steps):.0f}",
                f"{count(events, EVENTS, num_steps):.0f}",
                f"{count(events, WAITS, num_steps):.1f}",
            )
            details.append((f"{known[model].title}, {side}", events))
            if options.trace and side == TRAINER and model == options.models[0]:
                profile(step, TRACE_STEPS)[1].export_chrome_trace(str(options.trace))
    for title, events in details:
        print(f"\n{title}: on the device, per step")
        show_top(events, num_steps)
        print(f"{title}: on the host, per step")
        show_host(events, num_steps)


if __name__ == "__main__":
    main()
