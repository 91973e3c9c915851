"""Taking turns: several sides in the same processes, round after round, so that noise hits each alike."""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist


def attempt(call: Callable[[], float]) -> tuple[float, str]:
    """Return the highest of what `call` returns on all ranks, and what went wrong first in time where something did.

    Collective over the default group, in which nothing else happens.
    """
    figure, error = 0.0, ""
    try:
        figure = call()
    except Exception as raised:  # noqa: BLE001 - whatever a side does, the others go on
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    outcomes = [(figure, time.monotonic(), error)] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcomes[0])
    errors = [(when, error) for _, when, error in outcomes if error]
    return max(figure for figure, _, _ in outcomes), min(errors)[1] if errors else ""


def play_round(
    sides: Sequence[str], take_turn: Callable[[str], float], seconds: dict[str, list[float]], errors: dict[str, str]
) -> None:
    """Let each side that has not failed yet have its turn (collective)."""
    for side in filter(seconds.__contains__, sides):
        dist.barrier()
        spent, error = attempt(partial(take_turn, side))
        if error:
            errors[side] = error
            del seconds[side]
        else:
            seconds[side].append(spent)


def return_large_blocks() -> None:
    """Let malloc give every large block back to the system when it is freed, so that figures can be repeated.

    By default it begins to keep them, and then resident memory tells of its holes as well.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


def own_bytes() -> int:
    """Return this process's share of the memory that is not a file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
