"""`lockstep check SCRIPT`: what goes wrong in a script when it trains on several workers."""

import json
import tokenize
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.command import command
from lockstep.cli.failures import FAILURE_EXIT, failures_shown
from lockstep.cli.script_trial import Trial, try_script
from lockstep.doctor.scripts import Level, ScriptFinding, check_source
from lockstep.errors import UsageError, counted


def check(
    scripts: Annotated[list[Path], typer.Argument(metavar="SCRIPT...", help="Training scripts.")],
    run_steps: Annotated[
        int | None,
        typer.Option("--run", metavar="STEPS", min=1, help="Run each on two CPU workers too, until so many steps."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings for programs.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for notes too.")] = False,
) -> None:
    """Read training scripts, and list what goes wrong with several workers, each with the line as it should be.

    Exit code 0 without mistakes, 1 with some, 2 if a script cannot be read; the others are checked all the same.
    """
    with failures_shown(debug=False):
        found: dict[Path, list[ScriptFinding] | None] = {}
        problems: list[str] = []
        for path in scripts:
            try:
                found[path] = _check(path)
            except UsageError as error:
                problems.append(str(error))
        said = {path: try_script(path, run_steps) for path in found} if run_steps is not None else {}
        if as_json:
            values = [
                {"file": str(path), **_values(each)} for path, each_found in found.items() for each in each_found or ()
            ]
            typer.echo(json.dumps(values, indent=2))
        else:
            for path, findings in found.items():
                _show(path, findings)
        for path, trial in said.items():
            _show_trial(path, trial)
        if problems:
            raise UsageError("\n".join(problems))
        levels = {each.level for findings in found.values() for each in findings or ()}
        has_failed = any(trial.exit_code not in {0, None} for trial in said.values())
        if Level.MISTAKE in levels or has_failed or (strict and levels):
            raise typer.Exit(FAILURE_EXIT)


def _check(path: Path) -> list[ScriptFinding] | None:
    try:
        with tokenize.open(path) as file:  # in the encoding that its first lines declare
            return check_source(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}. (LS821)") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python script: {error}. (LS821)") from error


def _show_trial(path: Path, trial: Trial) -> None:
    for text in trial.said:
        typer.echo(f"{path}: {text}", err=True)
    end = "was ended then" if trial.exit_code is None else f"ended with exit code {trial.exit_code}"
    typer.echo(f"{path}: ran {counted(trial.num_steps, 'step')} on two workers, and {end}", err=True)


def _show(path: Path, findings: Sequence[ScriptFinding] | None) -> None:
    if findings is None:
        typer.echo(f"{path}: nothing in it is data-parallel: no process group, wrapper or distributed sampler.")
        return
    for each in findings:
        typer.echo(f"{path}:{each.line}: {each.level.value} ({each.rule}): {each.text}\n    {each.mended}")
    mistakes = sum(each.level is Level.MISTAKE for each in findings)
    typer.echo(f"{path}: {counted(mistakes, 'mistake')}, {counted(len(findings) - mistakes, 'note')}")


def _values(finding: ScriptFinding) -> dict[str, object]:
    return {**asdict(finding), "level": finding.level.value}


COMMAND = command(check)
