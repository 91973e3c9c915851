"""Turning exceptions into a message and an exit code of the command."""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lockstep.errors import LockstepError, UsageError, WorkerFailedError

USAGE_EXIT = 2
FAILURE_EXIT = 1
RESUME_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: the run was stopped by a request and can be resumed."""
INTERRUPTED_EXIT = 130


@contextmanager
def failures_shown(*, debug: bool) -> Iterator[None]:
    """Turn what is raised inside, KeyboardInterrupt included, into a message and an exit code; main thread only.

    Args:
        debug: Show the traceback of bad input too.
    """
    try:
        # Until here Ctrl-C ends the process at once (`lockstep_command`). A shell script starts background jobs with
        # SIGINT ignored. This line undoes that, so that `kill -INT` stops them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILURE_EXIT) from None
    except UsageError as error:
        _show(error, traceback.format_exc() if debug else "")
        raise typer.Exit(USAGE_EXIT) from None
    except LockstepError as error:  # raised in this process, which another launcher has started as a worker
        _show(error, traceback.format_exc() if debug else "")
        raise typer.Exit(FAILURE_EXIT) from None


def _show(error: BaseException, trace: str) -> None:
    if trace:
        typer.echo(trace, err=True)
    typer.echo(f"error: {error}", err=True)
