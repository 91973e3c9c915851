"""How long a step would take on another number of workers."""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.report.page import forecast_notes
from lockstep.report.page.measure import MeasuredSteps, forecast_steps

TWO_WORKERS = MeasuredSteps(
    workers=2,
    num_shards=8,
    step=np.full(10, 0.052),
    shard=[np.full(40, 0.010), np.full(40, 0.008)],
    loading=np.full(10, 0.002),
    fixed=np.full(10, 0.003),
    exchange=np.full(10, 0.006),
)


def seconds(measured: MeasuredSteps) -> dict[int, float]:
    return {each.workers: each.seconds for each in forecast_steps(measured)}


def test_the_measured_number_of_workers_is_as_measured() -> None:
    [measured] = [each for each in forecast_steps(TWO_WORKERS) if each.is_measured]
    assert measured.workers == 2
    assert measured.seconds == pytest.approx(0.052)


def test_shards_divide_and_the_exchange_grows_as_a_ring_does() -> None:
    found = seconds(TWO_WORKERS)
    waiting = 0.052 - 4 * 0.010 - 0.002 - 0.003 - 0.006
    rest, loading = 0.003 + waiting, 0.002 / 4
    assert found[4] == pytest.approx(rest + 2 * (0.010 + loading) + 0.006 * (3 / 4) / (1 / 2))
    assert found[8] == pytest.approx(rest + 0.010 + loading + 0.006 * (7 / 8) / (1 / 2))
    assert found[6] == pytest.approx(rest + 2 * (0.010 + loading) + 0.006 * (5 / 6) / (1 / 2))  # some have two shards


def test_one_worker_neither_exchanges_nor_waits() -> None:
    assert seconds(TWO_WORKERS)[1] == pytest.approx(0.003 + 8 * (0.010 + 0.002 / 4))


def test_more_workers_than_shards_are_not_forecast() -> None:
    assert max(seconds(TWO_WORKERS)) == 8


def test_on_a_cpu_it_is_an_upper_bound_for_fewer_workers() -> None:
    found = forecast_steps(TWO_WORKERS)
    assert forecast_notes(found, cores=8).count("forecast_at_most") == 1
    assert "forecast_at_most" not in forecast_notes(found, cores=None)


def test_from_one_worker_it_is_the_best_case() -> None:
    alone = replace(TWO_WORKERS, workers=1, step=np.full(5, 0.1), shard=[np.full(40, 0.010)], exchange=np.empty(0))
    assert [each.is_best_case for each in forecast_steps(alone)] == [False, True, True, True, True]


def test_the_band_holds_what_varies() -> None:
    varying = replace(TWO_WORKERS, step=np.linspace(0.050, 0.060, 11))
    [measured] = [each for each in forecast_steps(varying) if each.is_measured]
    assert measured.low < measured.seconds < measured.high


def test_nothing_is_forecast_from_nothing() -> None:
    assert forecast_steps(replace(TWO_WORKERS, step=np.empty(0))) == []
    assert forecast_steps(replace(TWO_WORKERS, shard=[np.empty(0)])) == []
