"""The parts of a step, and what a run has measured, from recordings whose times are known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.recording.file_format import EventKind, StepPhase
from lockstep.report.page.measure import forecast_steps, measure_tables, step_parts

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
