"""`lockstep check SCRIPT`: what goes wrong in a script when it trains on several workers."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import command
from lockstep.doctor.scripts import Level, ScriptFinding, check_source
from lockstep.doctor.slow import step_starts
from lockstep.errors import UsageError, counted
from lockstep.recording.reading import read_recording
from lockstep.settings import read_settings

_MOST_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.2
_END_SECONDS: Final = 10.0
_RANK: Final = re.compile(r"^(\[rank \d+\] |\[rank\d+\]:? ?)*")
_SAID: Final = re.compile(r"(Warning|Error): |^The job stands still|^error: ")


@dataclass(frozen=True, slots=True)
class Trial:
    said: tuple[str, ...]
    num_steps: int
    """So many steps, or backwards of a wrapper, had the slowest worker begun."""
    exit_code: int | None


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

    `lockstep verify SCRIPT` runs one on 1, 2 and 3 workers, and compares what they do.

    Exit code 0 without mistakes, 1 with some, 2 if a script cannot be read; the others are checked all the same.
    """
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
            {"file": str(path), **asdict(each), "level": each.level.value}
            for path, findings in found.items()
            for each in findings or ()
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
        config = f" To try a config: lockstep train {path} --dry-run." if path.suffix in {".yaml", ".yml"} else ""
        raise UsageError(f"{path} is not a Python script: {error}.{config} (LS821)") from error


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


def try_script(path: Path, steps: int) -> Trial:
    """Run a script on two CPU workers until they have begun so many steps, or for two minutes (local).

    Torch's wrapper and samplers in it are replaced by ours, as with `lockstep run --drop-in`.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "lockstep", "run", "--drop-in", "--devices", "cpu:2", str(path)]
        job = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            env=read_settings().for_worker({"TMPDIR": folder, "LOCKSTEP_RECORDING": "on"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            is_enough, num_steps = False, 0
            pause = threading.Event()
            for _ in range(round(_MOST_SECONDS / _LOOK_SECONDS)):
                has_ended = job.poll() is not None
                num_steps = max(num_steps, _count_steps(Path(folder)))
                is_enough = num_steps >= steps
                if has_ended or is_enough:
                    break
                pause.wait(_LOOK_SECONDS)
            if is_enough:
                pause.wait(_LOOK_SECONDS)  # for what is said of the last of these steps
            code, size = job.poll(), os.fstat(output.fileno()).st_size
        finally:
            _end(job)
        output.seek(0)
        # What ranks say when they are ended, and the others are gone already, is not of the script.
        lines = [_RANK.sub("", line) for line in output.read(size).decode(errors="replace").splitlines()]
    return Trial(tuple(dict.fromkeys(filter(_SAID.search, lines))), num_steps, code)


def _end(job: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, number)
        try:
            job.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _count_steps(folder: Path) -> int:
    files = [file for each in folder.glob("lockstep-*/*") for file in read_recording(each)]
    return min((len(step_starts(file.table)) for file in files if not file.is_launchers), default=0)


COMMAND = command(check)
