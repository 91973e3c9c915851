"""`lockstep audit RUN`: take steps of a run again and compare them with its log; or compare the logs of two runs."""

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import FORCE, command
from lockstep.cli.options import CODE, DEVICES, WORKERS, call_on_saved
from lockstep.errors import UsageError, counted
from lockstep.launch.messages import Run
from lockstep.runs.audit import Replay, choose_start, describe_replay, take_again
from lockstep.runs.audit_log import ReadLog, compare_logs, read_log
from lockstep.runs.config import apply_overrides, parse_config, placement_overrides
from lockstep.runs.directory import AUDIT_NAME
from lockstep.runs.opening import SavedRun, find_code

_OTHERWISE: dict[str, Any] = {
    "on_worker_loss": "stop",
    "min_workers": 1,
    "respawn": None,
    "spares": 0,
    "evict_after": None,
    "audit": True,
    "first_steps_verified": 0,
    "max_time": None,
    "resume": None,
    "run_dir": None,
    "trackers": [],
    "early_stopping": None,
    "finish": None,
    "finish_args": {},
    "save_code": False,
    "keep": 1,
    "keep_best": None,
}
"""What a config is changed to where steps are only taken again."""
_STEPS = re.compile(r"(\d*):(\d*)|(\d+)")


def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run that was trained with audit=true.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Another run: show where the two part, and take no step.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Steps, counted from 1.  [default: all of the log]")
    ] = None,
    workers: WORKERS = None,
    devices: DEVICES = None,
    force: FORCE = False,
    code: CODE = None,
) -> None:
    """Take steps of a run again, from the checkpoint before them, and compare their bits with the run's audit log.

    Exit code 0 if every step is confirmed, 1 if the log was altered or a step differs.
    """
    log = read_log(run)
    typer.echo(f"{run / AUDIT_NAME}: {counted(log.num_lines, 'line')}, up to step {log.last_step}")
    if log.problem:
        typer.echo(f"NOT INTACT: {log.problem} (LS824)")
        raise typer.Exit(FAILURE_EXIT)
    if other is not None:
        _compare(log, other, run)
        return
    first, last = _read_steps(steps, log)
    start = choose_start(log, run, first)
    values = {**log.config, **_OTHERWISE}
    apply_overrides(values, placement_overrides(values, workers, devices))
    saved = SavedRun(
        checkpoint=start or run,
        config=parse_config(values, AUDIT_NAME),
        code=find_code(run),
        where="",
        digest="",
        metrics={},
    )
    typer.echo(f"taking steps again up to {last}, from {'the beginning' if start is None else start.name} ...")
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-", ignore_cleanup_errors=True) as folder:
        found = call_on_saved(audit_worker, saved, run, last, Path(folder), code=code, force=force, is_quiet=False)
    typer.echo(describe_replay(log, found, run))
    if not found.is_confirmed:
        raise typer.Exit(FAILURE_EXIT)


def audit_worker(run: Run, saved: SavedRun, run_dir: Path, last: int, folder: Path) -> Replay:
    start = saved.checkpoint if saved.checkpoint != run_dir else None
    log = read_log(run_dir) if run.rank == 0 else ReadLog()  # a long one takes much memory
    return take_again(saved.config, log, start, last, run.device, folder)


def _compare(log: ReadLog, other: Path, run: Path) -> None:
    theirs = read_log(other)
    if theirs.problem:
        typer.echo(f"{other / AUDIT_NAME} is NOT INTACT: {theirs.problem} (LS824)")
        raise typer.Exit(FAILURE_EXIT)
    changes, num_shared, difference = compare_logs(log, theirs)
    for change in changes:
        typer.echo(f"  {change}")
    if difference is not None:
        typer.echo(f"The runs part at {difference}.")
        raise typer.Exit(FAILURE_EXIT)
    if not num_shared:
        raise UsageError(
            f"No step of {run} is one of {other}: compare two runs that have taken the same steps. (LS824)"
        )
    typer.echo(f"equal in each of the {counted(num_shared, 'update')} that both have")


def _read_steps(text: str | None, log: ReadLog) -> tuple[int, int]:
    match = _STEPS.fullmatch(text or ":")
    first, last = log.first_step, log.last_step
    if match is not None:
        first = int(match[1] or match[3] or first)
        last = int(match[2] or match[3] or last)
    if match is None or not log.first_step <= first <= last <= log.last_step or not log.steps:
        raise UsageError(
            f"--steps is {text!r}, expected FIRST:LAST within the steps of the log, {log.first_step}:{log.last_step}. "
            "(LS824)"
        )
    return first, last


COMMAND = command(audit)
