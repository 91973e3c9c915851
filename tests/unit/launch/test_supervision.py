"""How long the launcher waits for an earlier failure than those that it has seen."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch.supervision import patience_after


def failed(exit_code: int | None, *, is_consequence: bool = False) -> Any:
    return SimpleNamespace(exit_code=exit_code, is_consequence=lambda: is_consequence)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([failed(-9)], 0.05),  # it waited half a second, although nothing that another worker does kills this one
        ([failed(None, is_consequence=True), failed(-9)], 0.05),
        ([failed(1)], 0.3),
        ([failed(-11)], 0.3),  # a reader of memory that another one has cut off
        ([failed(None, is_consequence=True)], 5.0),
        ([failed(None, is_consequence=True), failed(1)], 0.3),
    ],
)
def test_a_kill_is_the_cause_and_an_error_about_another_worker_is_not(workers: list[Any], expected: float) -> None:
    assert patience_after(workers, is_sure=False) == expected


def test_one_that_exits_without_a_traceback_is_waited_for_only_where_another_may_have_failed() -> None:
    assert patience_after([failed(3)], is_sure=True) == 0.05
    assert patience_after([failed(None, is_consequence=True)], is_sure=True) == 5.0
