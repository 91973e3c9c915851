"""The end of `lockstep train`: what is drawn, removed and printed, however the training ends."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.cli.failures import RESUME_EXIT
from lockstep.cli.main import table_console
from lockstep.processes.stop_signals import StopRequest
from lockstep.report.metrics_file import read_metrics
from lockstep.runs.directory import METRICS_NAME, REPORT_NAME, discard_unused
from lockstep.runs.listing import forget_ending, write_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a worker sends of a run that has reached its end."""

    test: Mapping[str, float]
    """Mean of each metric over the test set."""
    num_test_samples: float
    num_right: float | None
    """How many of them are right; None without accuracy."""
    is_saved: bool
    finish: str | None
    """What the config's `finish` function returned."""
    fingerprint: str
    digest: str
    others: Sequence[str]
    """Which of the metrics are not of the test set."""
    end_reason: str
    """Why the run has ended before its last epoch; empty if it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What a worker sends of a run that has stopped on request."""

    checkpoint: Path
    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """The next step in it, from 0."""
    num_steps: int | None
    """Steps of an epoch."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    run_dir: Path
    result: Finished | Stopped
    is_shown_here: bool
    """Whether this process is the one that prints."""


@contextmanager
def cleaning_up(run_dir: Path, stop: StopRequest, *, with_report: bool) -> Iterator[None]:
    """Write the report, note how it ended and remove an unused run directory, however the training ends."""
    ending, reason = "stopped", ""
    forget_ending(run_dir)
    try:
        yield
        ending = "stopped" if stop.is_made else "finished"
    except KeyboardInterrupt as interruption:
        ending = "interrupted"
        if found := find_checkpoints(run_dir):
            interruption.add_note(f"To resume from {found[0]}, use --resume {run_dir}.")
        raise
    except BaseException as error:
        ending, reason = "failed", str(error)
        raise
    finally:
        write_ending(run_dir, ending, reason)
        Console().show_cursor()  # a worker that was stopped may have hidden it behind its progress bar
        if with_report and not stop.is_made:  # a run that is asked to stop may have no time to draw
            _write_report(run_dir)
        discard_unused(run_dir)


def _write_report(run_dir: Path) -> None:
    if not (run_dir / METRICS_NAME).exists():
        return
    try:
        from lockstep.report.page import write_page  # not at the top: importing Bokeh takes long
        from lockstep.report.page.run_data import read_run

        write_page([read_run(run_dir, str(run_dir))], run_dir / REPORT_NAME)
    except Exception as error:  # noqa: BLE001 - must not hide how the run ended; an environment may lack Bokeh
        why = f"{type(error).__name__}: {error}"
        again = f"`lockstep report {run_dir}` tries again"
        typer.echo(f"warning: {run_dir / REPORT_NAME} could not be written: {why}. {again}. (LS815)", err=True)


def show_ending(ended: EndedRun, arguments: Sequence[str]) -> None:
    """Print how the run ended, if this process is the one that prints; exit with 75 if the run was stopped."""
    if isinstance(ended.result, Finished):
        if ended.is_shown_here:
            _show_result(ended.result, ended.run_dir)
        return
    if ended.is_shown_here:
        stopped = ended.result
        of_all = "" if stopped.num_steps is None else f" of {stopped.num_steps}"
        where = f"after step {stopped.step}{of_all} of epoch {stopped.epoch + 1}"
        if stopped.step == 0:
            where = f"after epoch {stopped.epoch}"
        command = shlex.join(["lockstep", "train", *arguments, "--resume", str(ended.run_dir)])
        typer.echo(
            f"Stopped on request {where}. The run is saved in {ended.result.checkpoint}. Resume with: {command}",
            err=True,
        )
    raise typer.Exit(RESUME_EXIT)


def _show_summary(run_dir: Path) -> None:
    """Print for each value of the epochs its first, last, lowest and highest one."""
    metrics = run_dir / METRICS_NAME
    rows = [row for row in read_metrics(metrics) if row["kind"] == "epoch"] if metrics.exists() else []
    if len(rows) < 2:  # noqa: PLR2004 - the line of its progress has shown the only one
        return
    table = Table("", "first", "last", "lowest", "highest", box=None, pad_edge=False)
    for name in rows[-1]:
        values = [(row[name], row["epoch"] + 1) for row in rows if isinstance(row.get(name), float)]
        if name != "learning_rate" and values:
            ends = [f"{value:.5g}" for value, _ in (values[0], values[-1])]
            extremes = [f"{value:.5g} (epoch {epoch})" for value, epoch in (min(values), max(values))]
            table.add_row(name.replace("_", " "), *ends, *extremes)
    table_console(120).print(table, highlight=False)


def _show_result(result: Finished, run_dir: Path) -> None:
    if result.end_reason:
        typer.echo(f"training ended: {result.end_reason}")
    if result.finish is not None:
        typer.echo(f"\n{result.finish}\n")
    if result.num_right is not None:
        right, counted = int(result.num_right), int(result.num_test_samples)
        typer.echo(f"test accuracy {result.test['accuracy']:.2%} ({right:,} of {counted:,}, each counted once)")
    elif "loss" in result.test:
        typer.echo(f"test loss {result.test['loss']:.4f}")
    shown = "accuracy" if result.num_right is not None else "loss"
    for name, value in result.test.items():
        if name not in {shown, "loss"}:
            number = f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
            typer.echo(f"{name.replace('_', ' ', 1)} {number}" if name in result.others else f"test {name} {number}")
    _show_summary(run_dir)
    typer.echo(f"run directory {run_dir}")
    if not result.is_saved:
        typer.echo(
            "warning: the last checkpoint was not written, so the trained weights are not on the disk.", err=True
        )
    typer.echo(f"fingerprint {result.fingerprint}")
    typer.echo(f"digest {result.digest}")
