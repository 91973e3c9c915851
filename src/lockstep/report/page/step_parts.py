"""The parts of each step of one worker, which together are the whole step; pure.

| rest: between two steps, prepare | compute           | exchange            | rest  | exchange | rest   |
|  loading  |                      | shard, shard, ... | until all are there |       | agree    | update |
                                                       ^ last gradient
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.recording import EventKind
from lockstep.report.page.time_shares import AGREE, COMPUTE, phases

_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step of one worker, in seconds."""

    whole: float
    """From the end of the step before to its own."""
    loading: float
    """Waiting for its data."""
    compute: float
    """Forward and backward of its shards, until the last gradient."""
    num_shards: int
    exchange: float
    """From the last gradient until all gradients are there, and agreeing on the step."""
    rest: float
    """All else."""


def step_parts(table: NDArray[Any]) -> dict[int, StepParts]:
    """Return the parts of each step in a recording, by its number; of one worker."""
    found = phases(table)
    whole = _by_step(found[:, 3], found[:, 1] - found[:, 0])
    computing = found[found[:, 2] == COMPUTE]
    agreeing = _by_step(found[found[:, 2] == AGREE, 3], np.diff(found[found[:, 2] == AGREE, :2])[:, 0])
    reducing = dict(_events(table, EventKind.REDUCING))
    loading = dict(_events(table, EventKind.LOADING))
    shards = table[(table["kind"] == EventKind.SHARD) & (table["end"] > 0)]
    numbers, counts = np.unique(shards["step"], return_counts=True)
    num_shards = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    ends = {int(step): int(end) for _, end, _, step in computing.tolist()}
    compute = _by_step(computing[:, 3], computing[:, 1] - computing[:, 0])
    result: dict[int, StepParts] = {}
    for step, end in ends.items():
        begin, waited = reducing.get(step, (0, 0.0))
        own = compute[step] - (waited if 0 < begin < end else 0.0)  # the last backward ends with that
        exchange = waited + agreeing.get(step, 0.0)
        loaded = loading.get(step, (0, 0.0))[1]
        result[step] = StepParts(
            whole=whole[step],
            loading=loaded,
            compute=own,
            num_shards=num_shards.get(step, 0),
            exchange=exchange,
            rest=max(whole[step] - own - exchange - loaded, 0.0),
        )
    return result


def _by_step(steps: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[int, float]:
    numbers, places = np.unique(steps, return_inverse=True)
    sums = np.bincount(places, weights=lengths, minlength=len(numbers)) / _SECOND
    return dict(zip(numbers.tolist(), sums.tolist(), strict=True))


def _events(table: NDArray[Any], kind: EventKind) -> Iterator[tuple[int, tuple[int, float]]]:
    """Yield for each step when the first event of a kind began, in nanoseconds, and the seconds of all of them."""
    rows = table[(table["kind"] == kind) & (table["end"] > 0)]
    seconds = _by_step(rows["step"], rows["end"] - rows["begin"])
    for row in rows[::-1]:
        step = int(row["step"])
        if step in seconds:
            yield step, (int(row["begin"]), seconds[step])
