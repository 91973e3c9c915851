"""Turning exceptions into a message and an exit code of the command."""

import os
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from lockstep.errors import LockstepError, UsageError, WorkerFailedError
from lockstep.explanations import codes_in
from lockstep.launch.exits import describe_failures, has_users_frame, users_part

USAGE_EXIT = 2
FAILURE_EXIT = 1
RESUME_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: the run was stopped by a request and can be resumed."""
INTERRUPTED_EXIT = 130
_CONDITION = re.compile(r"=\s*(\d+(?:\.\d+)?\s*(?:gib|gb|mib|mb))", re.IGNORECASE)


@contextmanager
def failures_shown(*, debug: bool) -> Iterator[None]:
    """Turn what is raised inside, KeyboardInterrupt included, into a message and an exit code; main thread only."""
    try:
        # Until here Ctrl-C ends the process at once (`lockstep_command`). A shell script starts background jobs with
        # SIGINT ignored. This line undoes that, so that `kill -INT` stops them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check_not_redirected()
        yield
    except KeyboardInterrupt as interruption:
        said = ["Interrupted; every worker has ended.", *getattr(interruption, "__notes__", [])]
        typer.echo(f"\n{' '.join(said)}", err=True)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    except WorkerFailedError as error:
        cause = error.__cause__
        if isinstance(cause, UsageError):
            _show(cause, error.failures[0].traceback if debug else "")
            raise typer.Exit(USAGE_EXIT) from None
        # Errors of Lockstep say what to do and need no traceback. If any worker raised another exception, the report
        # of all workers is printed instead, because it contains the traceback of that exception.
        if cause is not None and not debug and all(isinstance(it.error, LockstepError) for it in error.failures):
            _show(cause, "")
            raise typer.Exit(FAILURE_EXIT) from None
        text = error if debug else _shorten(error)
        _echo("\n".join([f"error: {text}", *getattr(error, "__notes__", [])]))
        raise typer.Exit(FAILURE_EXIT) from None
    except UsageError as error:
        _show(error, traceback.format_exc() if debug else "")
        raise typer.Exit(USAGE_EXIT) from None
    except LockstepError as error:  # raised in this process, which another launcher has started as a worker
        _show(error, traceback.format_exc() if debug else "")
        raise typer.Exit(FAILURE_EXIT) from None


def _shorten(error: WorkerFailedError) -> str:
    """Return the report of the workers with the user's part of their tracebacks."""
    if str(error) != describe_failures(error.failures):
        return str(error)
    # An error of ours with a code says what to do; where there is no line of the user's, frames would say nothing.
    short = [
        replace(each, traceback="")
        if codes_in(str(each.error)) and not has_users_frame(each.traceback)
        else replace(each, traceback=users_part(each.traceback))
        for each in error.failures
    ]
    text = describe_failures(short)
    return text if text == str(error) else f"{text}\n\nThe frames of Lockstep are left out; --debug shows them."


def _show(error: BaseException, trace: str) -> None:
    if trace:
        typer.echo(trace, err=True)
    _echo(f"error: {error}")


def _echo(text: str) -> None:
    codes = codes_in(text)
    typer.echo(f"{text}\n`lockstep explain {' '.join(codes)}` says more." if codes else text, err=True)


def check_not_redirected() -> None:
    """Refuse to write to a file such as `=20GiB`, which a shell makes of `auto:3>=20GiB` without quotes."""
    try:
        target = Path(os.readlink("/proc/self/fd/1"))  # noqa: PTH115 - the link's own text
    except OSError:  # not Linux
        return
    if (found := _CONDITION.fullmatch(target.name)) is not None:
        raise UsageError(
            f"Standard output is the file {target.name}: the shell has read `>{target.name}` as a redirection, so the "
            f"condition on free memory is lost. Write it as @{found[1]}, for example device_ids=auto:3@{found[1]}, and "
            f"delete the file {target}. (LS820)"
        )
