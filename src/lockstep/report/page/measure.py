"""How long a step would take on another number of workers, from what one run has measured; pure.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUMBERS: Final = (1, 2, 4, 6, 8, 16)
"""The numbers of workers that the page shows."""
_QUARTILES: Final = (25, 50, 75)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What a run has measured, one array per worker where it says so; in seconds."""

    workers: int
    num_shards: int
    """Shards of a step."""
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
    """A step on a number of workers."""

    workers: int
    seconds: float
    """A step in the middle."""
    low: float
    """Lower end of the band."""
    high: float
    """Upper end of the band."""
    is_measured: bool
    """Whether the run had this number."""
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
    """The parts of a step at one percentile."""

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
        """Return the seconds of a step on a number of workers."""
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
