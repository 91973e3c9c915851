"""How long a step would take on another number of workers; pure.

    step(n) = fixed + most shards of one worker * (shard + its loading) + exchange(n) + waiting

A shard is that of the slowest worker. The exchange is what a step takes from the last gradient of the last worker until
all know the result. A ring or shared memory moves 2 (n - 1) / n times the gradients for each worker, so the measured
exchange is scaled by that. Waiting is what is left of a step: workers that are now quicker, now slower. One worker
neither exchanges nor waits: from its run both are unknown, and the forecast says what is possible at best. What is
fixed is all else, such as the update; it does not depend on the workers.

The band comes from the quartiles of the same figures. Where there are fewer cores than workers the forecast does not
hold, because workers then wait for each other's core. On a CPU, workers share caches and memory: with fewer of them a
shard is quicker than it was measured, so for fewer workers than the run had the page says "at most".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lockstep.recording.file_format import EventKind, StepPhase
from lockstep.report.page.run_data import RunData

NUMBERS: Final = (1, 2, 4, 6, 8, 16)
_QUARTILES: Final = (25, 50, 75)
_FIRST_STEPS = 2
"""So many steps at the beginning of a recording are left out: they make buffers, and choose kernels."""
_FEWEST = 3
_SECOND: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What a run has measured, one array per worker where it says so; in seconds."""

    workers: int
    num_shards: int
    step: NDArray[np.float64]
    """Whole steps, of any worker."""
    shard: Sequence[NDArray[np.float64]]
    """Forward and backward of a shard, without any wait for others, for each worker."""
    loading: NDArray[np.float64]
    """Waiting for the data of a step, of any worker."""
    fixed: NDArray[np.float64]
    """What is neither of these nor the exchange, in a step, of any worker."""
    exchange: NDArray[np.float64]
    """From the last gradient of a step until all workers know the result, of the worker that came last to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    workers: int
    seconds: float
    low: float
    high: float
    is_measured: bool
    is_best_case: bool
    """Whether exchange and waiting are unknown and left out: it takes longer than this."""


def forecast_steps(measured: MeasuredSteps, numbers: Sequence[int] = NUMBERS) -> list[Forecast]:
    """Return a forecast for each number of workers up to the number of shards; empty if too little was measured."""
    if not len(measured.step) or not any(len(each) for each in measured.shard):
        return []
    low, middle, high = (_Parts.at(measured, quartile) for quartile in _QUARTILES)
    numbers = sorted({*(n for n in numbers if n <= measured.num_shards), measured.workers})
    return [
        Forecast(
            workers=number,
            seconds=middle.step(number),
            low=low.step(number),
            high=high.step(number),
            is_measured=number == measured.workers,
            is_best_case=measured.workers == 1 and number > 1,
        )
        for number in numbers
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    measured: MeasuredSteps
    whole: float
    shard: float
    loading: float
    fixed: float
    exchange: float
    waiting: float

    @staticmethod
    def at(measured: MeasuredSteps, percentile: float) -> "_Parts":
        shard = max(_percentile(each, percentile) for each in measured.shard)
        loading, fixed, exchange, whole = (
            _percentile(each, percentile)
            for each in (measured.loading, measured.fixed, measured.exchange, measured.step)
        )
        left = max(whole - _most_shards(measured, measured.workers) * shard - loading - fixed - exchange, 0.0)
        is_alone = measured.workers == 1  # then nobody is waited for
        return _Parts(
            measured=measured,
            whole=whole,
            shard=shard,
            loading=loading / _most_shards(measured, measured.workers),
            fixed=fixed + left if is_alone else fixed,
            exchange=exchange,
            waiting=0.0 if is_alone else left,
        )

    def step(self, workers: int) -> float:
        if workers == self.measured.workers:
            return self.whole
        together = 0.0 if workers == 1 else self._exchange(workers) + self.waiting
        return self.fixed + _most_shards(self.measured, workers) * (self.shard + self.loading) + together

    def _exchange(self, workers: int) -> float:
        before = self.measured.workers
        return 0.0 if before == 1 else self.exchange * ((workers - 1) / workers) / ((before - 1) / before)


def _most_shards(measured: MeasuredSteps, workers: int) -> int:
    return -(-measured.num_shards // workers)


def _percentile(values: NDArray[np.float64], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step of one worker, in seconds; its parts together are the whole step.

    | rest: between two steps, prepare | compute           | exchange            | rest  | exchange | rest   |
    |  loading  |                      | shard, shard, ... | until all are there |       | agree    | update |
                                                           ^ last gradient
    """

    whole: float
    """From the end of the step before to its own."""
    loading: float
    compute: float
    """Forward and backward of its shards, until the last gradient."""
    num_shards: int
    exchange: float
    """From the last gradient until all gradients are there, and agreeing on the step."""
    rest: float


def step_parts(table: NDArray[Any]) -> dict[int, StepParts]:
    found = phases(table)
    whole = _by_step(found[:, 3], found[:, 1] - found[:, 0])
    computing = found[found[:, 2] == StepPhase.COMPUTE]
    agreed = found[found[:, 2] == StepPhase.AGREE]
    agreeing = _by_step(agreed[:, 3], agreed[:, 1] - agreed[:, 0])
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


def phases(table: NDArray[Any]) -> NDArray[np.int64]:
    """Return the phases as rows of (begin, end, phase, step), in nanoseconds; the last ends with the recording."""
    rows = table[table["kind"] == EventKind.PHASE]
    if not len(rows):
        return np.empty((0, 4), np.int64)
    last = max(int(table["begin"].max()), int(table["end"].max()))
    ends = np.append(rows["begin"][1:], max(last, int(rows["begin"][-1])))
    return np.stack([rows["begin"], ends, rows["index"], rows["step"]], axis=1).astype(np.int64)
