"""Interleaved measurements: each round measures all sides in the same processes, so that noise affects all equally."""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist


def attempt(call: Callable[[], float]) -> tuple[float, str]:
    """Return the maximum over ranks of the result of `call`, and the first error in time, or an empty string.

    Collective over the default group.
    """
    figure, error = 0.0, ""
    try:
        figure = call()
    except Exception as raised:  # noqa: BLE001 - the other sides continue
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    outcomes = [(figure, time.monotonic(), error)] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcomes[0])
    errors = [(when, error) for _, when, error in outcomes if error]
    return max(figure for figure, _, _ in outcomes), min(errors)[1] if errors else ""


def run_round(
    sides: Sequence[str], measure_side: Callable[[str], float], seconds: dict[str, list[float]], errors: dict[str, str]
) -> None:
    """Measure each side that has not failed yet (collective)."""
    for side in filter(seconds.__contains__, sides):
        dist.barrier()
        spent, error = attempt(partial(measure_side, side))
        if error:
            errors[side] = error
            del seconds[side]
        else:
            seconds[side].append(spent)


def return_large_blocks() -> None:
    """Make malloc return every large block to the system when it is freed, so that figures are reproducible.

    By default malloc starts to keep such blocks, and resident memory then includes free blocks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


def private_bytes() -> int:
    """Return the process's proportional share (PSS) of anonymous and shared memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
