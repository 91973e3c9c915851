"""What the recording of a run says of its steps, for the forecast; pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.report.page.measure import MeasuredSteps
from lockstep.report.page.run_data import RunData
from lockstep.report.page.step_parts import step_parts

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
    """Return what the recorded events of the workers of one generation say; None if that is too little."""
    found = [step_parts(table) for table in tables]
    common = sorted(set.intersection(*(set(each) for each in found)))[_FIRST_STEPS:-1]  # the last one may be under way
    if len(common) < _FEWEST:
        return None
    parts = [[each[step] for step in common] for each in found]
    is_alone = len(tables) == 1
    # The worker that comes last to an exchange waits for nobody there: its time is the cost of the exchange itself.
    exchange = [] if is_alone else [min(each.exchange for each in at_once) for at_once in zip(*parts, strict=True)]
    every = [each for of_worker in parts for each in of_worker]
    return MeasuredSteps(
        workers=len(tables),
        num_shards=num_shards,
        step=np.array([each.whole for each in every]),
        shard=[np.array([e.compute / e.num_shards for e in each if e.num_shards]) for each in parts],
        loading=np.array([each.loading for each in every]),
        fixed=np.array([each.rest + (each.exchange if is_alone else 0.0) for each in every]),
        exchange=np.array(exchange),
    )
