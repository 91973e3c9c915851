"""How long a step would take on another number of workers, from what one run has measured; pure.

    step(n) = rest + most shards of one worker * shard + exchange(n)

A shard is that of the slowest worker. The exchange is what a step takes from the end of its last shard until all
know the result. A ring or shared memory moves 2 (n - 1) / n times the gradients for each worker, so the measured
exchange is scaled by that. One worker exchanges nothing: from its run the exchange is unknown, and the forecast says
what is possible at best. The rest is all else, such as loading and the update; it does not depend on the workers.

The band comes from the quartiles of the same figures. Where there are fewer cores than workers the forecast does not
hold, because workers then wait for each other's core.
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
    """Number of workers of the run."""
    num_shards: int
    """Shards of a step."""
    step: NDArray[np.float64]
    """Whole steps, of any worker."""
    shard: Sequence[NDArray[np.float64]]
    """Forward and backward of a shard, for each worker."""
    exchange: NDArray[np.float64]
    """From the end of a step's last shard until all workers know the result, for each step of the slowest worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A step on a number of workers."""

    workers: int
    """The number."""
    seconds: float
    """A step in the middle."""
    low: float
    """Lower end of the band."""
    high: float
    """Upper end of the band."""
    is_measured: bool
    """Whether the run had this number."""
    is_best_case: bool
    """Whether the exchange is unknown and left out."""


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a step at one percentile."""

    measured: MeasuredSteps
    shard: float
    exchange: float
    rest: float

    @staticmethod
    def at(measured: MeasuredSteps, percentile: float) -> "_Parts":
        """Return the parts at a percentile."""
        shard = max(float(np.percentile(each, percentile)) for each in measured.shard if len(each))
        exchange = float(np.percentile(measured.exchange, percentile)) if len(measured.exchange) else 0.0
        step = float(np.percentile(measured.step, percentile))
        own = -(-measured.num_shards // measured.workers) * shard
        return _Parts(measured, shard, exchange, max(step - own - exchange, 0.0))

    def step(self, workers: int) -> float:
        """Return the seconds of a step on a number of workers."""
        return self.rest + -(-self.measured.num_shards // workers) * self.shard + self._exchange(workers)

    def _exchange(self, workers: int) -> float:
        before = self.measured.workers
        if before == 1:
            return self.exchange
        return self.exchange * ((workers - 1) / workers) / ((before - 1) / before)
