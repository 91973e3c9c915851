"""Turning a worker's report into what the caller of `launch` gets: a result, or an exception."""

import pickle
from typing import Any

from lockstep.errors import WorkerFailedError, WorkerFailure
from lockstep.launch.exits import CONSEQUENCES, describe_failures
from lockstep.launch.messages import Report


def load_result(report: Report) -> Any:
    try:
        return pickle.loads(report.result or b"")  # noqa: S301 - from our own child
    except Exception as error:
        reason = f"returned a value that the launcher cannot unpickle: {type(error).__name__}: {error}"
        failure = WorkerFailure(rank=report.rank, reason=reason, traceback="", error=error)
        raise WorkerFailedError(
            f"Worker {report.rank} {reason}. Return numbers, text, containers or CPU tensors. (LS120)", (failure,)
        ) from error


def load_error(report: Report) -> BaseException | None:
    """Return the worker's exception; None if it cannot be unpickled here. The report has its text in any case."""
    try:
        error: BaseException | None = pickle.loads(report.error) if report.error is not None else None  # noqa: S301
    except Exception:  # noqa: BLE001 - unpickling a user's class may raise anything
        return None
    return error


def is_consequence(report: Report) -> bool:
    """Return whether the worker's exception says that another worker failed."""
    return isinstance(load_error(report), CONSEQUENCES)


def failed_error(failures: tuple[WorkerFailure, ...], stop_reason: str = "") -> WorkerFailedError:
    """Return the error for these failures, the first in time first; `stop_reason`: why the others did not continue."""
    message = describe_failures(failures)
    error = WorkerFailedError(f"{message}\n\n{stop_reason}" if stop_reason else message, failures)
    error.__cause__ = failures[0].error
    return error
