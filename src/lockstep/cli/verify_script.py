"""`lockstep verify SCRIPT`: run a script as it is on several numbers of workers, and say what depends on them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import typer

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.doctor.scripts import Level
from lockstep.doctor.scripts.observed import ObservedRun, judge_runs
from lockstep.errors import UsageError, counted
from lockstep.settings import OBSERVATION, read_settings

_MOST_SECONDS: Final = 300.0
_END_SECONDS: Final = 10.0
_NUM_LAST_LINES: Final = 5


def verify_script(path: Path, arguments: Sequence[str], counts: Sequence[int], limit: int, *, as_json: bool) -> None:
    """Run a script on each number of CPU workers, compare, print; exit with 1 if there are mistakes."""
    runs: dict[int, ObservedRun] = {}
    for count in counts:
        begun = time.monotonic()
        runs[count] = observe_script(path, arguments, count, limit)
        typer.echo(f"{counted(count, 'worker')}: {_describe(runs[count])}, {time.monotonic() - begun:.0f} s", err=True)
        if _has_spawned(runs[count]):
            raise UsageError(
                f"{path} starts its processes itself, and lockstep verify starts one for each rank. Give it a script "
                "that torchrun starts: one that reads RANK and WORLD_SIZE. (LS549)"
            )
        if count == min(counts) and runs[count].exit_code != 0 and (count == 1 or not any(runs[count].ranks)):
            raise UsageError(f"{path} does not run on {counted(count, 'worker')}. {runs[count].last_words} (LS549)")
    findings = judge_runs(runs)
    if as_json:
        values = [{"line": each.line, "level": each.level.value, "text": each.text} for each in findings]
        typer.echo(
            json.dumps({"runs": {count: _describe(run) for count, run in runs.items()}, "findings": values}, indent=2)
        )
    else:
        for each in findings:
            typer.echo(f"{each.line or path}: {each.level.value}: {each.text}")
        num_mistakes = sum(each.level is Level.MISTAKE for each in findings)
        typer.echo(f"{path}: {counted(num_mistakes, 'mistake')}, {counted(len(findings) - num_mistakes, 'note')}")
    if any(each.level is Level.MISTAKE for each in findings):
        raise typer.Exit(FAILURE_EXIT)


def observe_script(path: Path, arguments: Sequence[str], count: int, limit: int) -> ObservedRun:
    """Run a script on `count` CPU workers with what writes down what it does; files are afterwards as before."""
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder, tempfile.TemporaryFile() as output:
        held = Path(folder)
        (held / "temporary").mkdir()
        variables = {
            OBSERVATION: f"{limit},{held}",
            "TMPDIR": str(held / "temporary"),
            "WANDB_MODE": "disabled",
            "LOCKSTEP_STALL_SECONDS": "20",
        }
        job = subprocess.Popen(  # noqa: S603 - our own interpreter
            [
                *(sys.executable, "-m", "lockstep", "run", "--drop-in", "--devices", f"cpu:{count}"),
                *(str(path), *arguments),
            ],
            env=read_settings().for_worker(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = _wait(job)
        finally:
            ranks = [_read(held / f"rank-{rank}.jsonl") for rank in range(count)]
            _restore([event for events in ranks for event in events])
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    return ObservedRun(ranks=ranks, exit_code=code, last_words=" / ".join(lines[-_NUM_LAST_LINES:]))


def _has_spawned(run: ObservedRun) -> bool:
    return any(each["kind"] == "spawned" for events in run.ranks for each in events)


def _wait(job: "subprocess.Popen[bytes]") -> int | None:
    try:
        return job.wait(_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            if job.poll() is None:
                os.killpg(job.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    job.wait(_END_SECONDS)


def _read(path: Path) -> list[Mapping[str, Any]]:
    events = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line of a process that was killed
            events.append(json.loads(line))
    return events


def _restore(events: Sequence[Mapping[str, Any]]) -> None:
    """Put the files of the user's back as they were before the script."""
    first: dict[str, Mapping[str, Any]] = {}
    for each in sorted((each for each in events if each["kind"] == "file"), key=lambda each: each["at"]):
        first.setdefault(each["path"], each)
    for path, event in sorted(first.items(), reverse=True):  # what is in a folder before the folder
        with suppress(OSError):
            if event["kept"]:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(event["kept"], path)
            elif not event["existed"]:
                Path(path).rmdir() if Path(path).is_dir() else Path(path).unlink()
            elif event["how"] == "rmdir":
                Path(path).mkdir(exist_ok=True)


def _describe(run: ObservedRun) -> str:
    steps = max((sum(each["kind"] == "step" for each in events) for events in run.ranks), default=0)
    cut = any(each["kind"] == "stopped" or each.get("is_cut") for events in run.ranks for each in events)
    how = (
        "did not end"
        if run.exit_code is None
        else f"ended with {run.exit_code}" * bool(run.exit_code) or "ran to its end"
    )
    return f"{counted(steps, 'step')}, {how}" + ", passes over the data cut short" * cut
