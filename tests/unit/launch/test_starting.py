"""Starting all workers again where some were lost before the first step, without processes."""

from typing import Any

import pytest

from lockstep.devices import Placement
from lockstep.devices.choose import CPU
from lockstep.errors import WorkerFailedError
from lockstep.launch.elastic import Elastic
from lockstep.launch.starting import LostAtStartError, StartAgain, call_until_begun

FAILED = WorkerFailedError("Worker 1 failed first: killed by SIGKILL")


class Starts:
    """Starts of which some lose workers."""

    def __init__(self, *lost: set[int], is_unchanged: bool = True, respawn: int = 0, min_workers: int = 1) -> None:
        self.lost = list(lost)
        self.sizes: list[int] = []
        self.said: list[str] = []
        self.elastic = Elastic(respawn=respawn)
        self.again: Any = StartAgain(min_workers=min_workers, is_unchanged=lambda: is_unchanged, tell=self.said.append)

    def call(self, placement: Placement) -> str:
        self.sizes.append(len(placement.devices))
        lost = self.lost.pop(0) if self.lost else set()
        if lost:
            raise LostAtStartError(FAILED, frozenset(lost), "Worker 1 (pid 7) was killed by SIGKILL")
        return "trained"

    def run(self) -> str:
        placement = Placement(devices=(CPU, CPU, CPU), reason="")
        return call_until_begun(self.call, placement, self.elastic, self.again)


def test_it_starts_again_with_those_that_are_left() -> None:
    starts = Starts({1}, {0})
    assert starts.run() == "trained"
    assert starts.sizes == [3, 2, 1]
    assert starts.said[0] == (
        "Worker 1 (pid 7) was killed by SIGKILL, before the training began. It starts again with 2 workers. Nothing is "
        "lost."
    )


def test_lost_workers_are_replaced_as_often_as_that_is_allowed() -> None:
    starts = Starts({1}, {0, 2}, {1}, respawn=2)
    assert starts.run() == "trained"
    assert starts.sizes == [3, 3, 3, 2]


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(Starts({0, 1}, min_workers=2), id="too few are left"),
        pytest.param(Starts({0, 1, 2}), id="none is left"),
        pytest.param(Starts({0}, is_unchanged=False), id="a step was taken"),
    ],
)
def test_else_it_is_an_error(starts: Starts) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        starts.run()
    assert caught.value is FAILED, "the class of ours that carries it is nothing for the caller"
    assert len(starts.sizes) == 1


def test_functions_of_the_users_own_are_not_called_again() -> None:
    starts = Starts({0})
    starts.again = None
    with pytest.raises(WorkerFailedError):
        starts.run()
