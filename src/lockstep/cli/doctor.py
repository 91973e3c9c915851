"""`lockstep doctor`: what a job does, or did last, and who is the cause if it stands still."""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import pynvml
import typer

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import command, table_console
from lockstep.devices.nvml import NoGpusError, read_gpus
from lockstep.doctor.examination import examine, last_job
from lockstep.doctor.finding import find_recording
from lockstep.doctor.report import chrome_trace, print_examination, print_slow, slow_to_json, to_json
from lockstep.doctor.slow import SlowReport, find_slow, recorded_usage, sample_workers
from lockstep.errors import UsageError
from lockstep.recording.reading import read_recording
from lockstep.runs.audit_log import describe_log

_BAD = frozenset({"stalled", "failed"})


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="[RUN_DIR]", help="A run directory; without it the newest job.")
    ] = None,
    pid: Annotated[int | None, typer.Option("--pid", help="The job of this process, a worker or a launcher.")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Show what the main thread of each worker runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report for programs.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline for ui.perfetto.dev to this file, and end.")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Show where the time of the last steps went, and end.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
) -> None:
    """Show what each worker of a job does, or did last; if it stands still, who is the cause and what to do.

    For a job that runs, on the host of its workers, and for one that has ended. Exit code 0 if nothing is the matter, 1
    if it stands still or has failed, 2 if there is no recording.
    """
    if trace is not None:
        _write_trace(find_recording(run_dir, pid), trace)
        return
    if slow:
        _show_slow(find_recording(run_dir, pid), as_json=as_json)
        return
    console = table_console()
    while True:
        found = examine(find_recording(run_dir, pid), wants_stacks=stacks)
        if as_json:
            typer.echo(to_json(found))
        else:
            if watch:
                console.clear()
            pids = {worker.pid for worker in found.workers if worker.facts is not None}
            print_examination(found, console, with_stacks=stacks, gpus=gpu_use(pids))
            if run_dir is not None and (log := describe_log(run_dir)):
                console.print(f"audit log {log}", soft_wrap=True)
        if not watch:
            break
        time.sleep(2)
    if found.verdict.kind in _BAD:
        raise typer.Exit(FAILURE_EXIT)


def gpu_use(pids: Collection[int]) -> dict[int, str]:
    """Return what processes have on GPUs, in words: these, and all others that are on a GPU of one of them (local)."""
    try:
        gpus, _ = read_gpus(pynvml) if pids else ((), None)
    except NoGpusError:
        return {}
    found: dict[int, list[str]] = {}
    for gpu in gpus:
        if any(holder.pid in pids for holder in gpu.holders):
            load = "" if gpu.utilisation_percent is None else f", busy {gpu.utilisation_percent} %"
            for holder in gpu.holders:
                memory = "" if holder.memory_bytes is None else f"{holder.memory_bytes / 2**20:,.0f} MiB on "
                whose = "" if holder.pid in pids or holder.user is None else f" ({holder.user})"
                found.setdefault(holder.pid, []).append(f"{memory}GPU {gpu.index}{load}{whose}")
    return {pid: "; ".join(texts) for pid, texts in found.items()}


def _show_slow(recording: Path, *, as_json: bool) -> None:
    found = _look_for_slow(recording)
    if as_json:
        typer.echo(slow_to_json(found))
    else:
        print_slow(found, recording, table_console())


def _look_for_slow(recording: Path) -> SlowReport:
    looks = sample_workers([file for file in last_job(read_recording(recording)) if not file.is_launchers])
    files = last_job(read_recording(recording))
    workers = [file for file in files if not file.is_launchers]
    launcher = next((file for file in files if file.is_launchers), None)
    usage = recorded_usage(launcher, workers)
    return find_slow(workers, usage, looks, os.getloadavg()[0] if looks else 0.0)


def _write_trace(recording: Path, path: Path) -> None:
    files = last_job(read_recording(recording))
    try:
        path.write_text(chrome_trace(files), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}. (LS815)") from error
    typer.echo(f"{path}: {sum(len(file.table) for file in files):,} events of {recording}; open it in ui.perfetto.dev")


COMMAND = command(doctor)
