import math
from functools import partial

import pytest

from lockstep.data import Cursor
from lockstep.engine.step_table import StepOutcome, StepResult
from lockstep.events import Event, StepFinished
from lockstep.runs.fit import EpochSums, StepLosses


class Log:
    """A device on which steps are launched, and a recorder: what happens in which order."""

    def __init__(self, *, is_late: bool) -> None:
        self.events: list[str] = []
        self.sums = EpochSums()
        self.losses = StepLosses(self.sums, self, is_late=is_late)

    def step(self, number: int, outcome: StepOutcome) -> None:
        self.events.append(f"launch {number}")
        result = StepResult(cursor=Cursor(0, number - 1), should_stop=False, read=partial(self._read, number, outcome))
        self.losses.add(result, number)

    def _read(self, number: int, outcome: StepOutcome) -> StepOutcome:
        if self.events[-1] != f"read {number}":
            self.events.append(f"read {number}")
        return outcome

    def record(self, event: Event) -> None:
        assert isinstance(event, StepFinished)
        self.events.append(f"row {event.global_step}")


GOOD = StepOutcome(loss=0.5, weight=4.0, is_skipped=False)
SKIPPED = StepOutcome(loss=math.nan, weight=4.0, is_skipped=True)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_sums_leave_out_what_was_skipped(is_late: bool) -> None:
    log = Log(is_late=is_late)
    for number, outcome in enumerate([GOOD, SKIPPED, GOOD], start=1):
        log.step(number, outcome)
    log.losses.record_last()
    log.losses.record_last()
    assert (log.sums.loss, log.sums.weight) == (4.0, 8.0)
    assert [event for event in log.events if event.startswith("row")] == ["row 1", "row 2", "row 3"]


def test_a_loss_is_read_when_the_next_step_is_launched_where_reading_waits() -> None:
    log = Log(is_late=True)
    for number in (1, 2):
        log.step(number, GOOD)
    assert log.events == ["launch 1", "launch 2", "read 1", "row 1"]
    log.losses.record_last()
    assert log.events[4:] == ["read 2", "row 2"]


def test_on_the_cpu_it_is_read_at_once() -> None:
    log = Log(is_late=False)
    log.step(1, GOOD)
    assert log.events == ["launch 1", "read 1", "row 1"]
