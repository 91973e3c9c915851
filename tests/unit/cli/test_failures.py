"""What a command prints, and its exit code, when something fails."""

import os

import pytest
import typer

from lockstep.cli import failures
from lockstep.cli.failures import FAILURE_EXIT, check_not_redirected, failures_shown
from lockstep.errors import LossError, PeerFailedError, UsageError, WorkerFailedError, WorkerFailure
from lockstep.launch.exits import describe_failures


def shown(capsys: pytest.CaptureFixture[str], *errors: Exception) -> str:
    failures = tuple(
        WorkerFailure(rank=rank, reason=f"failure {rank}", traceback="Traceback", error=error)
        for rank, error in enumerate(errors)
    )
    raised = WorkerFailedError("The whole story.", failures)
    raised.__cause__ = errors[0]
    with pytest.raises(typer.Exit) as ended, failures_shown(debug=False):
        raise raised
    assert ended.value.exit_code == FAILURE_EXIT
    return capsys.readouterr().err


def test_errors_of_ours_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LossError("Too much."), PeerFailedError("Rank 0 failed.")) == "error: Too much.\n"


def test_another_workers_own_error_is_not_hidden_by_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LossError("Too much."), KeyError("the culprit")) == "error: The whole story.\n"


def test_a_condition_that_the_shell_took_for_a_redirection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"/proc/self/fd/1": "/home/me/=20GiB"}
    monkeypatch.setattr(os, "readlink", targets.__getitem__)
    with pytest.raises(UsageError, match="device_ids=auto:3@20GiB"):
        check_not_redirected()
    targets["/proc/self/fd/1"] = "/home/me/log=20.txt"
    check_not_redirected()


def test_frames_before_the_users_are_left_out_without_debug(capsys: pytest.CaptureFixture[str]) -> None:
    ours = f'  File "{failures.__file__}", line 1, in step\n    call()\n'
    trace = f'Traceback (most recent call last):\n{ours}  File "/mine.py", line 7, in f\n    x\nKeyError: 1\n'
    found = WorkerFailure(rank=0, reason="KeyError: 1", traceback=trace, error=KeyError(1))
    for debug in (False, True):
        with pytest.raises(typer.Exit), failures_shown(debug=debug):
            raise WorkerFailedError(describe_failures([found]), (found,)) from KeyError(1)
        said = capsys.readouterr().err
        assert ('File "/mine.py", line 7' in said, "in step" in said, "--debug" in said) == (True, debug, not debug)


def test_an_error_of_ours_that_no_line_of_the_user_led_to_has_no_frames(capsys: pytest.CaptureFixture[str]) -> None:
    error = TypeError("The metric worst returned a float, expected a pair. (LS528)")
    ours = f'  File "{failures.__file__}", line 1, in step\n    raise TypeError(\n'
    trace = f"Traceback (most recent call last):\n{ours}TypeError: {error}\n"
    for mine, has_frames in (("", False), ('  File "/mine.py", line 7, in f\n    x\n', True)):
        traced = trace.replace(ours, mine + ours)
        found = WorkerFailure(rank=0, reason=f"TypeError: {error}", traceback=traced, error=error)
        with pytest.raises(typer.Exit), failures_shown(debug=False):
            raise WorkerFailedError(describe_failures([found]), (found,)) from error
        said = capsys.readouterr().err
        assert ("The metric worst" in said, "Traceback" in said, "--debug" in said) == (True, has_frames, not mine)
