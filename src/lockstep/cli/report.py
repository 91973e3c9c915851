"""`lockstep report`: a page about a run, or about several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.main import command
from lockstep.errors import UsageError

_NAME = "report.html"


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="One or more run directories.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file.  [default: report.html in RUN_DIR, or here]")
    ] = None,
) -> None:
    """Write one HTML file about runs: curves, where the time goes, the last steps, other numbers of workers, config.

    It needs no network. A run may be going on.
    """
    from lockstep.report.page import write_page
    from lockstep.report.page.run_data import read_run

    names = [str(path) for path in run_dirs]
    if len(set(names)) < len(names):
        raise UsageError("A run directory was given twice; give each once. (LS821)")
    runs = [read_run(path, name) for path, name in zip(run_dirs, names, strict=True)]
    path = output or (run_dirs[0] / _NAME if len(run_dirs) == 1 else Path(_NAME))
    try:
        write_page(runs, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}. Name another file with --output. (LS815)") from error
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


COMMAND = command(report)
