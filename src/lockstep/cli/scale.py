"""`lockstep scale FOLDER`: let a run that trains have more workers, or fewer, or give a GPU back."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.channel.table import Message
from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import command
from lockstep.errors import UsageError
from lockstep.launch.control import ask, connect


def scale(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The run directory, or the folder of ls.Elastic."),
    ],
    workers: Annotated[int | None, typer.Option(min=1, help="How many workers the run is to have.")] = None,
    release: Annotated[
        str | None, typer.Option(metavar="GPU", help="A GPU that the run is to give back: GPU2, 2, or its UUID.")
    ] = None,
) -> None:
    """Change the number of workers of a run that trains, between two of its steps. No bit of the result changes.

    Returns when the change is done; Ctrl-C ends the waiting, not the change. Without options it shows the workers.
    """
    if workers is not None and release is not None:
        raise UsageError("--workers and --release contradict each other. Give one of them. (LS821)")
    if workers is not None:
        change(run_dir, {"op": "resize", "workers": workers})
    elif release is not None:
        change(run_dir, {"op": "release", "device": release})
    else:
        change(run_dir, {"op": "describe"})


def change(run_dir: Path, request: Message) -> None:
    try:
        client = connect(run_dir)
    except PermissionError as error:
        raise UsageError(
            f"The run in {run_dir} belongs to another user, who alone can change it: {error}. (LS603)"
        ) from error
    except OSError as error:
        raise UsageError(f"{_explain(run_dir)} (LS603)") from error
    with client:
        for answer in ask(client, request):
            if "error" in answer:
                typer.echo(f"error: {answer['error']}", err=True)
                raise typer.Exit(FAILURE_EXIT)
            typer.echo(answer.get("done") or answer.get("text"))
            if "done" in answer or request["op"] == "describe":
                return
    raise UsageError(f"The run in {run_dir} has ended meanwhile. (LS603)")


def _explain(run_dir: Path) -> str:
    if not run_dir.is_dir():
        return f"There is no folder {run_dir}. Name the run directory, or the folder that ls.Elastic was given."
    return (
        f"No run on this host listens in {run_dir}: it has ended, another launcher such as torchrun has started it, or "
        "it is a launch without ls.Elastic(folder=...)."
    )


COMMAND = command(scale)
