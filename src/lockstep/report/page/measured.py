"""What the recording of a run says of its steps, for the forecast; pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.recording import EventKind
from lockstep.report.page.forecast import MeasuredSteps
from lockstep.report.page.run_data import RunData
from lockstep.report.page.time_shares import event_seconds, phase_seconds, step_seconds

_FIRST_STEPS = 2
"""So many steps at the beginning of a recording are left out: they make buffers, and choose kernels."""
_FEWEST = 3


def measure_steps(run: RunData) -> MeasuredSteps | None:
    """Return what one generation of workers has measured; None if that is too little."""
    tables = [each.table for each in run.workers if len(each.table)]
    num_shards = run.listed.config.get("num_shards")
    if not tables or not isinstance(num_shards, int):
        return None
    accumulate = run.listed.config.get("accumulate")
    return measure_tables(tables, num_shards * (accumulate if isinstance(accumulate, int) else 1))


def measure_tables(tables: Sequence[NDArray[Any]], num_shards: int) -> MeasuredSteps | None:
    """Return what the recorded events of the workers of one generation say; None if that is too little.

    Args:
        tables: Of each worker.
        num_shards: Shards of a step.
    """
    steps = [step_seconds(table)[_FIRST_STEPS:] for table in tables]
    # The worker that waits least is the slowest: what it spends on the exchange is the cost of the exchange itself.
    exchanges = [phase_seconds(table, "gradients") for table in tables]
    agreements = [phase_seconds(table, "others") for table in tables]
    totals = [a[: len(b)] + b[: len(a)] for a, b in zip(exchanges, agreements, strict=True)]
    if min(len(each) for each in steps) < _FEWEST:
        return None
    return MeasuredSteps(
        workers=len(tables),
        num_shards=num_shards,
        step=np.concatenate(steps),
        shard=[event_seconds(table, EventKind.SHARD) for table in tables],
        exchange=min(totals, key=lambda each: float(np.median(each)) if len(each) else np.inf),
    )
