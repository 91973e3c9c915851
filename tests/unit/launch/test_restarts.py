"""Starting all workers again after a failure."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.devices import Placement
from lockstep.devices.choose import CPU
from lockstep.errors import WorkerFailedError, WorkerFailure
from lockstep.launch.restarts import call_with_restarts, check_restarts, run_with_restarts
from lockstep.launch.scripts import ScriptJob

Told = list[str]


def failing(times: int) -> Callable[[], int]:
    """Return a call that fails so often before it returns how often it was called."""
    calls: list[int] = []

    def call() -> int:
        calls.append(len(calls))
        if len(calls) <= times:
            reason = f"killed the {len(calls)}. time"
            failure = WorkerFailure(rank=1, reason=reason, traceback="", error=None)
            raise WorkerFailedError(f"Worker 1 failed first: {reason}\n\nmore", (failure,))
        return len(calls)

    return call


def restart(times: int, max_restarts: int, told: Told, *, may_restart: bool = True) -> int:
    return call_with_restarts(failing(times), max_restarts, lambda: may_restart, told.append)


def test_each_restart_is_told_with_its_reason() -> None:
    told: Told = []
    assert restart(2, 3, told) == 3
    assert told == [
        "Starting all workers again (restart 1 of at most 3). Worker 1 failed first: killed the 1. time",
        "Starting all workers again (restart 2 of at most 3). Worker 1 failed first: killed the 2. time",
    ]


def test_the_last_failure_names_those_before() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        restart(3, 2, [])
    lines = str(caught.value).splitlines()
    assert lines[0] == "Worker 1 failed first: killed the 3. time"
    assert lines[-3:] == [
        "All workers were started again 2 times, because before:",
        "  Worker 1 failed first: killed the 1. time",
        "  Worker 1 failed first: killed the 2. time",
    ]
    assert caught.value.rank == 1


@pytest.mark.parametrize(("max_restarts", "may_restart"), [(0, True), (5, False)])
def test_the_first_failure_stands(max_restarts: int, may_restart: bool) -> None:
    told: Told = []
    with pytest.raises(WorkerFailedError, match="killed the 1"):
        restart(1, max_restarts, told, may_restart=may_restart)
    assert not told


def test_a_number_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_restarts is -1"):
        check_restarts(-1)


def test_a_script_is_started_again_with_the_count_that_torchrun_sets(tmp_path: Path) -> None:
    command = (
        'test "$RANK" = 0 || exit 0; echo "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"; '
        "exit $((7 - $TORCHELASTIC_RESTART_COUNT))"
    )
    told: Told = []
    job = ScriptJob(
        program=("/bin/sh", "-c", command),
        arguments=(),
        placement=Placement(devices=(CPU, CPU), reason=""),
        log_dir=tmp_path / "logs",
        max_restarts=2,
    )
    ending = run_with_restarts(job, told.append)
    assert ending.exit_code == 5
    assert [text.splitlines()[-1].split(".")[0] for text in told] == [
        "Starting all workers again (restart 1 of at most 2)",
        "Starting all workers again (restart 2 of at most 2)",
    ]
    assert "started again 2 times" in ending.message
    logs = [tmp_path / "logs" / folder / "rank-0.stdout.log" for folder in ("", "restart-1", "restart-2")]
    assert [log.read_text() for log in logs] == ["0 of 2\n", "1 of 2\n", "2 of 2\n"]
