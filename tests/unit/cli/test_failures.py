"""What a command prints, and its exit code, when something fails."""

import pytest
import typer

from lockstep.cli.failures import FAILURE_EXIT, failures_shown
from lockstep.errors import LossError, PeerFailedError, WorkerFailedError, WorkerFailure


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
