"""The parts of a step, and what a run has measured, from recordings whose times are known."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.recording.file_format import EventKind, StepPhase
from lockstep.report.page import figures, forecast_notes
from lockstep.report.page.measure import MeasuredSteps, forecast_steps, measure_tables, step_parts
from lockstep.report.page.run_data import RunData

FIELDS = ("number", "begin", "end", "kind", "text", "step", "index", "size")
MILLISECOND = 1_000_000
IDLE, PREPARE, COMPUTE, REDUCE, AGREE, COMMIT, _CLOSED = StepPhase


def recorded(shards: Sequence[float], arrives: float, send: float, num_steps: int = 8) -> NDArray[Any]:
    """Return the events of steps, in milliseconds: 2 between steps, 1 of them loading, shards, exchange, 3 update.

    Args:
        shards: How long each shard of this worker takes.
        arrives: When the last worker has its gradients, after the begin of the shards.
        send: How long the exchange takes from then on.
    """
    rows: list[tuple[EventKind, float, float, int, int]] = []
    now = 0.0
    for step in range(num_steps):
        rows += [(EventKind.PHASE, now, now, step, IDLE), (EventKind.LOADING, now + 1, now + 2, step, 0)]
        begin = now + 2
        end = begin + max(arrives, sum(shards)) + send
        rows += [(EventKind.PHASE, begin, begin, step, PREPARE), (EventKind.PHASE, begin, begin, step, COMPUTE)]
        for number, length in enumerate(shards):
            is_last = number == len(shards) - 1
            rows.append((EventKind.SHARD, begin, end if is_last else begin + length, step, number))
            begin += length
        rows.append((EventKind.REDUCING, begin, end, step, 0))
        rows += [(EventKind.PHASE, end, end, step, phase) for phase in (REDUCE, AGREE, COMMIT)]
        now = end + 3
    table = np.zeros(len(rows), [(name, "i8") for name in FIELDS])
    for row, (kind, first, last, step, index) in zip(table, rows, strict=True):
        row["kind"], row["step"], row["index"] = kind, step, index
        row["begin"], row["end"] = round(first * MILLISECOND), round(last * MILLISECOND)
    return table


def test_the_wait_for_others_is_no_part_of_the_last_shard() -> None:
    parts = step_parts(recorded([4, 4], arrives=10, send=2))[3]
    assert parts.compute == pytest.approx(0.008)
    assert parts.num_shards == 2
    assert parts.exchange == pytest.approx(0.004)
    assert parts.loading == pytest.approx(0.001)
    assert parts.rest == pytest.approx(0.004)
    assert parts.whole == pytest.approx(parts.compute + parts.exchange + parts.loading + parts.rest)


def test_a_step_on_one_worker_is_forecast_from_two_that_wait() -> None:
    # The end of the last shard of each worker is the end of the exchange: a shard was measured with it, and so the step
    # of one worker was forecast up to 93 % too long.
    measured = measure_tables([recorded([5, 5], 10, 6), recorded([4, 4], 10, 6)], num_shards=4)
    assert measured is not None
    found = {each.workers: each.seconds for each in forecast_steps(measured)}
    assert found[1] == pytest.approx(0.004 + 4 * 0.005 + 2 * 0.001)  # twice the shards, and twice their loading
    assert found[2] == pytest.approx(0.021)
    assert found[4] == pytest.approx(0.004 + 0.005 + 0.0005 + 0.006 * (3 / 4) / (1 / 2))


def test_one_worker_is_forecast_at_best() -> None:
    measured = measure_tables([recorded([5, 5, 5, 5], 0, 0)], num_shards=4)
    assert measured is not None
    [one, two, four] = forecast_steps(measured, (2, 4))
    assert [one.seconds, two.seconds, four.seconds] == pytest.approx([0.025, 0.004 + 10.5e-3, 0.004 + 5.25e-3])
    assert [each.is_best_case for each in (one, two, four)] == [False, True, True]


def test_too_few_steps_measure_nothing() -> None:
    assert measure_tables([recorded([5, 5], 0, 0, num_steps=4)], num_shards=4) is None


# -- The timeline of the last steps ------------------------------------------------------------------------------------


SECOND = 1_000_000_000


def recording(*events: tuple[EventKind, float, float, int]) -> NDArray[Any]:
    """A table of (kind, begin, end, index), in seconds; a phase has no end of its own."""
    table = np.zeros(len(events), [(name, "i8") for name in FIELDS])
    for row, (kind, begin, end, index) in zip(table, events, strict=True):
        row["kind"], row["index"] = kind, index
        row["begin"], row["end"] = round(begin * SECOND), round(end * SECOND)
    return table


PHASE = EventKind.PHASE
ONE_STEP = recording(
    (PHASE, 1, 1, 2),  # prepare
    (PHASE, 2, 2, 3),  # compute
    (EventKind.SHARD, 2, 6, 0),
    (PHASE, 6, 6, 4),  # reduce
    (PHASE, 7, 7, 5),  # agree
    (PHASE, 9, 9, 6),  # commit
    (PHASE, 10, 10, 1),  # idle
    (EventKind.LOADING, 10.5, 12, 0),
    (EventKind.SAVING, 12, 12.25, 0),
    (PHASE, 13, 13, 2),
)


def test_of_many_workers_the_timeline_keeps_the_latest_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # It kept the last bars of the list, which has one worker after the other: the first ranks had empty rows.
    monkeypatch.setattr(figures, "_MOST_EVENTS", 6)
    workers = [
        SimpleNamespace(header=SimpleNamespace(rank=rank, boot="one"), table=ONE_STEP, text=lambda _: "")
        for rank in range(3)
    ]
    plot: Any = figures.draw_timeline(cast("RunData", SimpleNamespace(workers=workers)))
    [bars] = plot.renderers
    assert {rank for rank, _ in bars.data_source.data["row"]} == {"0", "1", "2"}


# -- How long a step would take on another number of workers -----------------------------------------------------------


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


def test_the_band_holds_what_varies() -> None:
    varying = replace(TWO_WORKERS, step=np.linspace(0.050, 0.060, 11))
    [measured] = [each for each in forecast_steps(varying) if each.is_measured]
    assert measured.low < measured.seconds < measured.high


def test_nothing_is_forecast_from_nothing() -> None:
    assert forecast_steps(replace(TWO_WORKERS, step=np.empty(0))) == []
    assert forecast_steps(replace(TWO_WORKERS, shard=[np.empty(0)])) == []
