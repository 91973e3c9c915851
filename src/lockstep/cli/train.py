"""`lockstep train CONFIG`: train from a config file.

The launcher does not import torch for a new run: its workers begin to import it at once. So what needs torch is
imported by the functions that run in a worker, or that read a checkpoint.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.cli.failures import RESUME_EXIT
from lockstep.cli.main import FORCE, command, table_console
from lockstep.cli.options import CONFIG, DEVICES, VALUES, WORKERS, ResumingCommand, find_config, place_run
from lockstep.devices import Placement
from lockstep.devices.choose import CPU
from lockstep.errors import CheckpointError, UsageError, WorkerFailedError, clause, counted
from lockstep.events import Recorder, Recorders
from lockstep.launch.launcher import (
    LaunchSettings,
    call_on_workers,
    find_launcher,
    join_started,
    make_template,
    run_here,
)
from lockstep.launch.messages import Run, pack_call
from lockstep.launch.restarts import Elastic, StartAgain
from lockstep.processes.stop_signals import StopRequest, handle_stop_signals, ignore_stop_signals, stop_signals_handled
from lockstep.recording.file_format import RECORDING_NAME
from lockstep.report.metrics_file import MetricsFile, Succession, read_metrics, sum_epoch
from lockstep.report.progress import PlainLines, ProgressBar
from lockstep.report.trackers import Following, check_trackers, make_trackers
from lockstep.runs.changes import check_names
from lockstep.runs.config import Config, placement_overrides, read_config
from lockstep.runs.directory import METRICS_NAME, REPORT_NAME, discard_unused
from lockstep.runs.listing import FitResult, StopResult, forget_ending, write_ending
from lockstep.runs.opening import OpenedRun, OpenRequest, open_run, with_recorded_shards
from lockstep.settings import read_settings

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.comm.bootstrap.identity import WorldVariables
    from lockstep.runs.saving import Resume

_AUTO: Final = "auto"
"""For `--resume`: the run of the config's `run_dir`, or of this job, if there is one; see `OpenRequest`."""


def train(
    given: CONFIG,
    overrides: VALUES = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[PATH]",
            help="Resume a run from its newest checkpoint, or from PATH, a checkpoint or a run directory; auto: "
            "or begin it, if there is none.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="With --resume: accept a changed KEY, although it changes the result; all for any.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Take two steps, evaluate, save, and keep nothing: to find mistakes.")
    ] = False,
    overfit: Annotated[
        int | None,
        typer.Option(metavar="BATCHES", min=1, help="Train and evaluate on the first BATCHES batches alone."),
    ] = None,
    workers: WORKERS = None,
    devices: DEVICES = None,
    force: FORCE = False,
) -> None:
    """Train the model of a config file.

    SIGTERM and SIGUSR1 save and stop: exit code 75, continue with --resume. Exit code 0 when training is complete, 2
    for bad input, 130 after Ctrl-C, 1 otherwise.
    """
    with ExitStack() as held:
        config_path = find_config(given)
        config = read_config(config_path, overrides or [])
        if placed := placement_overrides(config.model_dump(), workers, devices):
            overrides = [*(overrides or []), *placed]
            config = read_config(config_path, overrides)
        if resume == _AUTO:
            config, resume = config.model_copy(update={"resume": _AUTO}), None
        if dry_run and resume is not None:
            raise UsageError("--dry-run tries a run from its beginning. Leave --resume out. (LS813)")
        if overfit is not None:
            config = config.model_copy(update={"overfit": overfit})
        if allow and resume is None and config.resume is None:
            raise UsageError("--allow applies only to a resumed run. Add --resume, or leave out --allow. (LS813)")
        check_names(allow or [], Config.model_fields)
        check_trackers(config.trackers)
        is_dry = dry_run or config.dry_run
        if is_dry:
            folder = held.enter_context(
                tempfile.TemporaryDirectory(prefix="lockstep-dry-run-", ignore_cleanup_errors=True)
            )
            changed = {"dry_run": True, "run_dir": f"{folder}/run", "resume": None, "trackers": []}
            config = config.model_copy(update=changed)
        wanted = OpenRequest(
            config=config,
            name=config_path.stem,
            resumed=resume,
            has_run_dir_override=any(override.startswith("run_dir=") for override in overrides or []),
            allowed=frozenset(allow or []),
            job=read_settings().job(),
        )
        # Modules that a config names are beside it; launch passes the search path to the workers.
        sys.path.insert(0, str(config_path.resolve().parent))
        launcher = find_launcher()
        arguments = [str(given), *(overrides or [])]
        stop = StopRequest()
        if launcher is None:
            stop.add_listener(_report_request)
            with stop_signals_handled(stop):
                ended = _train_launched(wanted, stop, arguments, force=force)
        else:
            handle_stop_signals(stop)
            ended = _train_joined(wanted, stop, launcher)
        _show_ending(ended, arguments)
        if is_dry and ended.is_shown_here:
            typer.echo("dry run complete: steps, evaluation and save work; nothing was kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    config: Config
    run_dir: Path
    resume: "Resume | None"
    code: Path


@dataclass(frozen=True, slots=True)
class EndedRun:
    run_dir: Path
    result: FitResult | StopResult
    is_shown_here: bool


def _train_launched(wanted: OpenRequest, stop: StopRequest, arguments: Sequence[str], *, force: bool) -> EndedRun:
    wanted = with_recorded_shards(wanted)
    config = wanted.config
    usual, (placement, config) = config.num_shards, place_run(config, force=force)
    num_workers = len(placement.devices)
    config.check_workers(num_workers)
    wanted = replace(wanted, config=config)
    with ExitStack() as held:
        template = make_template(  # it imports torch while this opens the run
            held,
            placement,
            threads=config.threads_per_worker,
            portable=config.portable,
            replaces=bool(config.respawn or config.spares),
            modules=["lockstep.cli.train", "lockstep.runs.fit"],
        )
        job = _open(wanted, held)
        typer.echo(f"devices: {placement.reason}")
        if config.num_shards != usual:
            typer.echo(f"num_shards is {config.num_shards}, for {num_workers} workers: the config has none")
        if placement.hint and config.balance != "speed":
            typer.echo(f"hint: {placement.hint}")
        if config.total_shards % num_workers:
            typer.echo(
                f"hint: {counted(config.total_shards, 'shard')} on {num_workers} workers: those with one more make the "
                "others wait. A new run is faster with a num_shards that is a multiple of the workers"
            )
        typer.echo(f"starting {counted(num_workers, 'worker')}, which import torch first ...")
        if config.on_worker_loss is None and not config.continues_on(_types(placement)):
            _warn_of_no_effect(config, "on GPUs, where a lost worker ends the run unless on_worker_loss is continue")
        elastic = Elastic(
            respawn=config.respawn,
            respawn_minutes=config.respawn_minutes,
            spares=config.spares,
            evict_after=config.evict_after,
            folder=job.run_dir,
        )
        settings = LaunchSettings(
            workers=config.workers,
            devices=placement,
            force=force,
            threads_per_worker=config.threads_per_worker,
            portable=config.portable,
            elastic=elastic,
            start_again=_start_again(job, placement),
            stop=stop,
            template=template,
            needs_every_result=False,
            recording=job.run_dir / RECORDING_NAME,
        )
        with _cleaning_up(job.run_dir, stop, with_report=config.report):
            try:
                result, *_ = call_on_workers(train_worker, (job,), {}, settings)
            except WorkerFailedError as error:
                _name_resumption(error, arguments, job.run_dir)
                raise
    return EndedRun(job.run_dir, result, is_shown_here=True)


def _types(placement: Placement) -> set[str]:
    return {"cpu" if device.name == CPU.name else "gpu" for device in placement.devices}


def _warn_of_no_effect(config: Config, why: str) -> None:
    """Warn of keys that are for workers that change, where these do not."""
    defaults = {name: field.default for name, field in Config.model_fields.items()}
    names = [name for name in ("respawn", "spares", "evict_after") if getattr(config, name) != defaults[name]]
    if names:
        typer.echo(
            f"warning: {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {why}. (LS813)", err=True
        )


def _start_again(job: Job, placement: Placement) -> StartAgain | None:
    """Return how all workers are started again where some were lost and others cannot continue; None for never."""
    if not job.config.continues_on(_types(placement)):
        return None
    metrics = job.run_dir / METRICS_NAME

    def read_progress() -> tuple[int, list[Path]]:
        return metrics.stat().st_size if metrics.exists() else 0, find_checkpoints(job.run_dir)

    before = read_progress()

    def resume() -> tuple[str, bytes]:
        from lockstep.checkpoint.file import read_manifest

        allowed = job.resume.allowed if job.resume is not None else frozenset[str]()
        for path in find_checkpoints(job.run_dir):
            with suppress(CheckpointError):  # it is damaged: the one before it is not
                resumed = replace(job, resume=_resume_from(path, read_manifest(path), metrics, allowed))
                return path.name, pack_call(train_worker, (resumed,), {})
        MetricsFile(metrics).rewind(0)
        return "its beginning, because there is no checkpoint,", pack_call(train_worker, (job,), {})

    return StartAgain(
        min_workers=job.config.min_workers,
        is_unchanged=lambda: read_progress() == before,
        resume=resume,
        tell=lambda text: typer.echo(text, err=True),
    )


def _name_resumption(error: WorkerFailedError, arguments: Sequence[str], run_dir: Path) -> None:
    """Say how to go on after workers were lost that raised no error: then nothing is to be mended first."""
    if any(failure.error is not None or failure.traceback for failure in error.failures):
        return
    if find_checkpoints(run_dir):
        again = shlex.join(["lockstep", "train", *arguments, "--resume", str(run_dir)])
        error.add_note(f"Resume from the newest checkpoint with: {again}")
    else:
        again = shlex.join(["lockstep", "train", *arguments])
        error.add_note(f"No checkpoint was saved yet. Start again with: {again}")


def _train_joined(wanted: OpenRequest, stop: StopRequest, launcher: "WorldVariables") -> EndedRun:
    """Train as one of the workers that another launcher has started; rank 0 prints the result."""
    world = join_started(wanted.config.device_ids)
    if world.rank == 0:
        _warn_of_no_effect(wanted.config, "under another launcher, which starts and ends the workers itself")

    def open_here() -> Job:
        found = with_recorded_shards(wanted)
        config = found.config.with_shards(world.world_size, is_said=True)
        config.check_workers(world.world_size)
        return _open(replace(found, config=config), held)

    with ExitStack() as held:
        job: Job = world.from_first(open_here)
        config = job.config
        if world.rank == 0:
            stop.add_listener(_report_request)
        with _cleaning_up(job.run_dir, stop, with_report=config.report) if world.rank == 0 else nullcontext():
            result, *_ = run_here(
                lambda run: _train(run, job, stop),
                launcher,
                workers=config.workers,
                devices=config.device_ids,
                threads=config.threads_per_worker,
                portable=config.portable,
                seed=0,
            )
    if isinstance(result, StopResult):
        ignore_stop_signals()
    return EndedRun(job.run_dir, result, is_shown_here=world.rank == 0)


def train_worker(run: Run, job: Job) -> FitResult | StopResult:
    stop = StopRequest()
    # Until the process ends: after training a request has no effect.
    handle_stop_signals(stop, on_sigterm=_leave_or_stop(stop))
    return _train(run, job, stop)


def _leave_or_stop(stop: StopRequest) -> Callable[[], None] | None:
    """Return what SIGTERM to this worker does: it leaves the others, or where it cannot, the run stops."""
    from lockstep.comm.generations import current_generations
    from lockstep.launch.worker import LeaveRequest

    generations = current_generations()
    if generations is None:
        return None
    # The launcher refuses while one of the workers cannot continue with others, and while the run starts.
    return LeaveRequest(generations, otherwise=stop.make).ask_from_handler


def _train(run: Run, job: Job, stop: StopRequest) -> FitResult | StopResult:
    """Train in one worker; rank 0 prints and records. If it is lost, another worker has its rank."""
    from lockstep.runs.audit_log import AuditLog
    from lockstep.runs.fit import fit

    if run.rank == 0 and not run.is_new:
        typer.echo("making the model and the data ...")
    with ExitStack() as stack:
        path = job.run_dir / METRICS_NAME
        metrics = MetricsFile(path, may_fail=job.config.on_save_error == "warn")
        trackers = stack.enter_context(
            Following(lambda: make_trackers(job.config.trackers), path, job.config.model_dump())
        )
        shown = Succession(lambda: run.rank == 0, metrics, lambda: Recorders([_make_progress(stack), trackers]))
        recorders: list[Recorder] = [shown]
        if job.config.audit:
            log = AuditLog(job.run_dir, job.config.model_dump(mode="json"))
            recorders.append(Succession(lambda: run.rank == 0, log, lambda: Recorders([])))
        result = fit(
            job.config,
            device=run.device,
            run_dir=job.run_dir,
            recorder=Recorders(recorders),
            resume=job.resume,
            code=job.code,
            stop=stop,
        )
        trackers.ending = "stopped" if isinstance(result, StopResult) else "finished"
    return result


def _report_request() -> None:
    """Print that a request to stop has arrived, because the current step may take long."""
    with suppress(OSError):  # not sys.stderr: this signal handler may have interrupted a write to it
        os.write(2, b"Stopping after the current step or evaluation. A second SIGTERM ends the run at once.\n")


def _open(wanted: OpenRequest, held: ExitStack) -> Job:
    """Open the run. If it is resumed, remove the lines of its metrics file that are later than the checkpoint."""
    opened = open_run(wanted, held, lambda text: typer.echo(f"warning: {text}", err=True))
    resume = None
    metrics = opened.run_dir / METRICS_NAME
    if opened.origin is None:
        MetricsFile(metrics).rewind(0)  # of a run that was killed before its first checkpoint, with resume: auto
    else:
        _show_origin(opened, wanted.resumed)
        manifest = opened.origin.manifest
        before = opened.origin.run_dir
        if before is not None and before != opened.run_dir and (before / METRICS_NAME).exists():
            metrics.write_bytes((before / METRICS_NAME).read_bytes())
        resume = _resume_from(opened.origin.checkpoint, manifest, metrics, frozenset(wanted.allowed))
    return Job(config=wanted.config, run_dir=opened.run_dir, resume=resume, code=Path(sys.path[0]))


def _resume_from(checkpoint: Path, manifest: "Manifest", metrics: Path, allowed: frozenset[str]) -> "Resume":
    """Remove the lines of the metrics that are later than a checkpoint; return how a run goes on from it."""
    from lockstep.runs.saving import Resume

    MetricsFile(metrics).rewind(manifest.global_step)
    loss, weight = sum_epoch(metrics, manifest.epoch)
    return Resume(path=checkpoint, allowed=allowed, epoch_loss=loss, epoch_weight=weight)


def _show_origin(opened: OpenedRun, resumed: str | None) -> None:
    assert opened.origin is not None
    chosen = "" if resumed else ", the newest checkpoint of the last run of this name"
    typer.echo(f"resuming from {opened.origin.checkpoint}{chosen}")
    if opened.origin.manifest.config is None:
        typer.echo("  it was saved without a config, so changes of the config cannot be listed")
    for change in opened.changes:
        typer.echo(f"  {change}")


def _make_progress(stack: ExitStack) -> Recorder:
    console = Console()
    return stack.enter_context(ProgressBar(console)) if console.is_terminal else PlainLines(console)


@contextmanager
def _cleaning_up(run_dir: Path, stop: StopRequest, *, with_report: bool) -> Iterator[None]:
    """Write the report, note how it ended and remove an unused run directory, however the training ends."""
    ending, reason = "stopped", ""
    forget_ending(run_dir)
    try:
        yield
        ending = "stopped" if stop.is_made else "finished"
    except KeyboardInterrupt as interruption:
        ending = "interrupted"
        found = find_checkpoints(run_dir)
        interruption.add_note(
            f"To resume from {found[0]}, use --resume {run_dir}."
            if found
            else "Nothing was saved: the first checkpoint is written after an epoch, or after save_every steps."
        )
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
    except Exception as error:  # noqa: BLE001 - must not hide how the run ended
        why = clause(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        again = f"`lockstep report {run_dir}` tries again"
        typer.echo(f"warning: {run_dir / REPORT_NAME} could not be written: {why}. {again}. (LS815)", err=True)


def _show_ending(ended: EndedRun, arguments: Sequence[str]) -> None:
    """Print how the run ended, if this process is the one that prints; exit with 75 if the run was stopped."""
    if isinstance(ended.result, FitResult):
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
    metrics = run_dir / METRICS_NAME
    rows = [row for row in read_metrics(metrics) if row["kind"] == "epoch"] if metrics.exists() else []
    if len(rows) < 2:  # noqa: PLR2004 - the line of its progress has shown the only one
        return
    table = Table("", "first", "last", "lowest", "highest", box=None, pad_edge=False)
    for name in rows[-1]:
        values = [(row[name], row["epoch"] + 1) for row in rows if isinstance(row.get(name), float)]
        if name != "learning_rate" and values:
            ends = [f"{value:.5g}" for value, _ in (values[0], values[-1])]
            both = (choose(values, key=itemgetter(0)) for choose in (min, max))  # of equal ones the first
            extremes = [f"{value:.5g} (epoch {epoch})" for value, epoch in both]
            table.add_row(name.replace("_", " "), *ends, *extremes)
    table_console(120).print(table, highlight=False)


def _show_result(result: FitResult, run_dir: Path) -> None:
    if result.end_reason:
        typer.echo(f"training ended: {result.end_reason}")
    if result.finish is not None:
        typer.echo(f"\n{result.finish}\n")
    # Beside an accuracy the loss of the same set says little.
    names = [name for name in result.test if name not in {result.shown, result.shown.replace("accuracy", "loss")}]
    for name in filter(None, [result.shown, *names]):
        number = f"{result.test[name]:.2%}" if name.endswith("accuracy") else f"{result.test[name]:.4f}"
        if name == result.shown and result.num_right is not None:
            number += f" ({int(result.num_right):,} of {int(result.num_test_samples):,}, each counted once)"
        typer.echo(f"{name.replace('_', ' ', 1)} {number}" if name in result.others else f"test {name} {number}")
    _show_summary(run_dir)
    typer.echo(f"run directory {run_dir}")
    if not result.is_saved:
        typer.echo(
            "warning: the last checkpoint was not written, so the trained weights are not on the disk.", err=True
        )
    typer.echo(f"fingerprint {result.fingerprint}")
    typer.echo(f"digest {result.digest}")


COMMAND = command(train, cls=ResumingCommand)
