"""`lockstep runs`: all runs of this directory, what they are doing, and what differs in their configs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lockstep.cli.main import JSON, command, table_console
from lockstep.errors import UsageError
from lockstep.runs.listing import ListedRun, find_differences, list_runs

_SHOWN_DIGITS = 16
_MAX_SHOWN = 8
_MAX_MEASURED = 4
_STYLES = {"running": "green", "finished": "", "stopped": "yellow", "interrupted": "yellow"}


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Folders of runs.  [default: runs, or this one]")
    ] = None,
    as_json: JSON = False,
) -> None:
    """List runs: state, progress, who runs them where, metrics, digest, and what differs in their configs."""
    given = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    if missing := [str(folder) for folder in given if not folder.is_dir()]:
        raise UsageError(f"There is no folder {', '.join(missing)}. (LS821)")
    found = list_runs(given)
    differences = find_differences(found)
    if as_json:
        entries = [
            {**asdict(run), "path": str(run.path), "differs": differs}
            for run, differs in zip(found, differences, strict=True)
        ]
        typer.echo(json.dumps({"runs": entries}, indent=2))
    elif not found:
        typer.echo(f"no runs in {', '.join(map(str, given))}; `lockstep train CONFIG` starts one")
    else:
        _show(found, differences)


def _show(found: Sequence[ListedRun], differences: Sequence[Mapping[str, Any]]) -> None:
    console = table_console(200)
    table = Table("run", "state", "epoch", "last evaluation", "digest", "started", "differs in")
    for run, differs in zip(found, differences, strict=True):
        table.add_row(
            Text(str(run.path)),
            Text(run.state, _STYLES.get(run.state, "red")),
            f"{run.epoch}/{run.epochs or '?'}" + (f", step {run.step}" if run.step else ""),
            Text("\n".join(_measured(run))),
            (run.digest or "")[:_SHOWN_DIGITS],
            (run.started or "")[:16].replace("T", " "),
            Text("\n".join(_differing(differs))),
        )
    console.print(table)
    for run in found:
        if run.holder is not None:
            console.print(
                f"{run.path}: {run.holder}; workers {'; '.join(run.workers)}", highlight=False, soft_wrap=True
            )
        elif run.reason:
            console.print(f"{run.path} failed: {run.reason}", highlight=False, markup=False, soft_wrap=True)


def _measured(run: ListedRun) -> list[str]:
    """Return a line for each metric, those first by which the run decides."""
    deciding = [str(run.config.get(key)).removeprefix("-") for key in ("keep_best", "early_stopping.metric")]
    names = [*(name for name in dict.fromkeys(deciding) if name in run.metrics), *run.metrics]
    return _cut([f"{name} {_format(name, run.metrics[name])}" for name in dict.fromkeys(names)], _MAX_MEASURED)


def _differing(differs: Mapping[str, Any]) -> list[str]:
    return _cut([f"{key}={json.dumps(value).strip(chr(34))}" for key, value in differs.items()], _MAX_SHOWN)


def _cut(lines: list[str], limit: int) -> list[str]:
    more = len(lines) - limit
    return [*lines[:limit], f"and {more} more"] if more > 0 else lines


def _format(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


COMMAND = command(runs)
