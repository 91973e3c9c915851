"""How long the launcher waits for an earlier failure than those that it has seen."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch.exits import patience_after


def failed(exit_code: int | None, *, is_consequence: bool = False) -> Any:
    return SimpleNamespace(exit_code=exit_code, is_consequence=lambda: is_consequence)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([failed(-9)], 0.05),  # it waited half a second, although nothing that another worker does kills this one
        ([failed(None, is_consequence=True), failed(-9)], 0.05),
        ([failed(1)], 0.5),
        ([failed(-11)], 0.5),  # a reader of memory that another one has cut off
        ([failed(None, is_consequence=True)], 5.0),
        ([failed(None, is_consequence=True), failed(1)], 0.5),
    ],
)
def test_a_kill_is_the_cause_and_an_error_about_another_worker_is_not(workers: list[Any], expected: float) -> None:
    assert patience_after(workers, 0.5) == expected
