"""Starting all workers again after a failure."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.devices import Placement
from lockstep.devices.choose import CPU
from lockstep.errors import WorkerFailedError, WorkerFailure
from lockstep.launch import scripts
from lockstep.launch.launcher import launch
from lockstep.launch.restarts import (
    CallToStart,
    Elastic,
    LostWorkersError,
    StartAgain,
    call_with_restarts,
)
from lockstep.launch.scripts import ScriptJob, python_program, run_script, run_with_restarts

Told = list[str]


THREE = CallToStart(placement=Placement(devices=(CPU, CPU, CPU), reason=""), call=b"from the beginning")


def failing(times: int) -> Callable[[CallToStart], int]:
    """Return a call that fails so often before it returns how often it was called."""
    calls: list[int] = []

    def call(_attempt: CallToStart) -> int:
        calls.append(len(calls))
        if len(calls) <= times:
            reason = f"killed the {len(calls)}. time"
            failure = WorkerFailure(rank=1, reason=reason, traceback="", error=None)
            raise WorkerFailedError(f"Worker 1 failed first: {reason}\n\nmore", (failure,))
        return len(calls)

    return call


def restart(times: int, max_restarts: int, told: Told, *, may_restart: bool = True) -> int:
    return call_with_restarts(
        failing(times), THREE, most=max_restarts, tell=told.append, may_restart=lambda: may_restart
    )


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
        launch(print, max_restarts=-1)


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


HELD = """
import os, sys, threading
open(os.environ["RANK"], "w").close()
threading.Thread(target=threading.Event().wait, name="logger").start()
while not (os.path.exists("0") and os.path.exists("1")):
    pass
if os.environ["RANK"] == "1":
    raise ValueError("boom")
if "fails" in sys.argv:
    threading.Event().wait(1)  # a connection that the other one has closed
    os._exit(5)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_worker_that_has_raised_and_is_held_up_by_a_thread_is_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_module: bool
) -> None:
    # The launcher waited for its end without an end, and the other workers with it.
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts, "SLOW_END_SECONDS", 0.1)
    monkeypatch.setattr(scripts, "RAISED_SECONDS", 0.3)
    program = python_program("held" if is_module else "held.py", is_module=is_module)
    placement = Placement(devices=(CPU, CPU), reason="")
    ending = run_script(ScriptJob(program=program, arguments=(), placement=placement))
    assert ending.exit_code == 1
    assert "Worker 1 failed first: raised an exception, and still ran 0.3 s later: thread 'logger'" in ending.message
    assert "ValueError: boom" in ending.message
    assert "worker 0" not in ending.message
    assert "Worker 1 has raised the exception above and still runs" in capfd.readouterr().err


def test_a_worker_that_has_raised_is_the_cause_though_another_one_ends_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.chdir(tmp_path)
    program = python_program("held.py", is_module=False)
    placement = Placement(devices=(CPU, CPU), reason="")
    ending = run_script(ScriptJob(program=program, arguments=("fails",), placement=placement))
    assert "Worker 1 failed first: raised an exception, and still ran when another had failed" in ending.message
    assert "Failed after it, probably because of it: worker 0 (ended with exit code 5)" in ending.message


def test_a_worker_that_handles_its_exception_has_not_raised(tmp_path: Path) -> None:
    (tmp_path / "handles.py").write_text(
        "import sys, threading, traceback\n"
        "try:\n    raise ValueError('handled')\n"
        "except ValueError:\n    traceback.print_exc()\n"
        "threading.Timer(0.5, lambda: None).start()\n"
    )
    program = python_program(str(tmp_path / "handles.py"), is_module=False)
    placement = Placement(devices=(CPU, CPU), reason="")
    assert run_script(ScriptJob(program=program, arguments=(), placement=placement)).exit_code == 0


FAILED = WorkerFailedError("Worker 1 failed first: killed by SIGKILL")


class Starts:
    """Starts of which some lose workers."""

    def __init__(
        self,
        *lost: set[int],
        is_unchanged: bool = True,
        has_begun: bool = False,
        respawn: int = 0,
        min_workers: int = 1,
        max_restarts: int = 0,
    ) -> None:
        self.lost = list(lost)
        self.has_begun = has_begun
        self.sizes: list[int] = []
        self.said: list[str] = []
        self.elastic = Elastic(respawn=respawn)
        self.max_restarts = max_restarts
        self.again: Any = StartAgain(
            min_workers=min_workers,
            is_unchanged=lambda: is_unchanged,
            resume=lambda: ("step-00000004.ckpt", b"from step 4"),
            tell=self.said.append,
        )

    def call(self, attempt: CallToStart) -> str:
        self.sizes.append(len(attempt.placement.devices))
        lost = self.lost.pop(0) if self.lost else set()
        if lost:
            killed = "Worker 1 (pid 7) was killed by SIGKILL"
            raise LostWorkersError(FAILED, frozenset(lost), killed, has_begun=self.has_begun)
        return f"trained {attempt.call.decode()}"

    def run(self) -> str:
        after_loss = None if self.again is None else partial(self.again.after, self.elastic.limit)
        return call_with_restarts(
            self.call, THREE, most=self.max_restarts, tell=self.said.append, after_loss=after_loss
        )


def test_it_starts_again_with_those_that_are_left() -> None:
    starts = Starts({1}, {0})
    assert starts.run() == "trained from the beginning"
    assert starts.sizes == [3, 2, 1]
    assert starts.said[0] == (
        "Worker 1 (pid 7) was killed by SIGKILL, before the training began. It starts again with 2 workers. Nothing is "
        "lost."
    )


def test_lost_workers_are_replaced_as_often_as_that_is_allowed() -> None:
    starts = Starts({1}, {0, 2}, {1}, respawn=2)
    assert starts.run() == "trained from the beginning"
    assert starts.sizes == [3, 3, 3, 2]


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(Starts({0, 1}, min_workers=2), id="too few are left"),
        pytest.param(Starts({0, 1, 2}), id="none is left"),
        pytest.param(Starts({0}, is_unchanged=False), id="a step was taken"),
        pytest.param(Starts({0, 1, 2}, has_begun=True), id="it may replace none"),
    ],
)
def test_else_it_is_an_error(starts: Starts) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        starts.run()
    assert caught.value is FAILED, "the class of ours that carries it is nothing for the caller"
    assert len(starts.sizes) == 1


def test_a_run_that_has_lost_all_goes_on_from_its_newest_checkpoint_as_often_as_workers_are_replaced() -> None:
    starts = Starts({0, 1, 2}, {0, 1, 2}, {0, 1, 2}, has_begun=True, respawn=2)
    with pytest.raises(WorkerFailedError):
        starts.run()
    assert starts.sizes == [3, 3, 3]
    starts = Starts({0, 1, 2}, has_begun=True, respawn=2)
    assert starts.run() == "trained from step 4"
    (said,) = starts.said
    assert said.startswith("Worker 1 (pid 7) was killed by SIGKILL, so the others cannot continue.")
    assert "The run goes on from step-00000004.ckpt with 3 workers" in said


def test_restarts_from_the_beginning_come_after_those() -> None:
    starts = Starts({0, 1, 2}, {0, 1, 2}, has_begun=True, respawn=1, max_restarts=1)
    assert starts.run() == "trained from the beginning"
    assert "restart 1 of at most 1" in starts.said[1]


def test_functions_of_the_users_own_are_not_called_again() -> None:
    starts = Starts({0})
    starts.again = None
    with pytest.raises(WorkerFailedError):
        starts.run()


@pytest.mark.parametrize(("respawn", "workers", "loading"), [(None, 0, 3), (0, 0, 0), (2, 2, 2)])
def test_loading_processes_are_started_anew_as_often_as_was_asked_for(
    respawn: int | None, workers: int, loading: int
) -> None:
    # With `respawn: 0` they were, three times.
    elastic = Elastic(respawn=respawn)
    assert (elastic.limit.count, elastic.loading_limit.count) == (workers, loading)
