"""Where the time of a worker went."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.recording import EventKind
from lockstep.report.page import figures
from lockstep.report.page.measure import SHARES, time_shares
from lockstep.report.page.run_data import RunData

FIELDS = ("number", "begin", "end", "kind", "text", "step", "index", "size")
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


def test_each_phase_is_one_part_and_nothing_is_counted_twice() -> None:
    shares = time_shares(ONE_STEP)
    assert shares == pytest.approx(
        {
            "loading": 1.5,
            "compute": 4.0,
            "gradients": 1.0,
            "others": 2.0,
            "update": 1.0,
            "evaluating": 0.0,
            "saving": 0.25,
            "rest": 1.0 + 3.0 - 1.75,
        }
    )
    assert sum(shares.values()) == pytest.approx(12.0)


def test_loading_in_another_thread_during_a_step_is_not_waited_for() -> None:
    beside = recording(
        (PHASE, 0, 0, 3), (EventKind.LOADING, 0, 4, 0), (PHASE, 3, 3, 1), (PHASE, 5, 5, 2)
    )  # of its four seconds one is between two steps
    assert time_shares(beside)["loading"] == pytest.approx(1.0)
    assert time_shares(beside)["compute"] == pytest.approx(3.0)


def test_a_recording_without_steps_has_no_shares() -> None:
    assert time_shares(recording((EventKind.STARTED, 0, 0, 0))) == dict.fromkeys(SHARES, 0.0)


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
