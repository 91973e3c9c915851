"""`lockstep train CONFIG`: train from a config file."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.checkpoint.step_files import find_checkpoints
from lockstep.cli.failures import RESUME_EXIT, failures_shown
from lockstep.devices import Placement, place_workers
from lockstep.errors import UsageError
from lockstep.events import Recorder
from lockstep.launch.external import find_launcher, join_started, run_here
from lockstep.launch.launcher import LaunchSettings, call_on_workers
from lockstep.launch.messages import Run
from lockstep.processes.stop_signals import StopRequest, handle_stop_signals, ignore_stop_signals, stop_signals_handled
from lockstep.report import MetricsFile, PlainLines, ProgressBar, Succession, sum_epoch
from lockstep.runs.changes import check_names
from lockstep.runs.config import Config, read_config
from lockstep.runs.fit import FitResult, StopResult, fit
from lockstep.runs.opening import OpenedRun, OpenRequest, open_run
from lockstep.runs.resuming import Resume
from lockstep.runs.run_directory import CURVES_NAME, METRICS_NAME, discard_unused
from lockstep.settings import WorldVariables, read_job


def train(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, e.g. examples/digits.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[PATH]",
            help="Resume a run from its newest checkpoint, or from PATH, a checkpoint or a run directory.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="With --resume: accept a changed KEY, although it changes the result; all for any.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Take GPUs that others hold, too.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")] = False,
) -> None:
    """Train the model of a config file.

    SIGTERM and SIGUSR1 save and stop: exit code 75, continue with --resume. Exit code 0 when training is complete, 2
    for bad input, 130 after Ctrl-C, 1 otherwise.
    """
    with failures_shown(debug=debug):
        config = read_config(config_path, overrides or [])
        if allow and resume is None:
            raise UsageError("--allow applies only to a resumed run. Add --resume, or leave out --allow.")
        check_names(allow or [], Config.model_fields)
        wanted = OpenRequest(
            config=config,
            name=config_path.stem,
            resumed=resume,
            has_run_dir_override=any(override.startswith("run_dir=") for override in overrides or []),
            allowed=frozenset(allow or []),
            job=read_job(),
        )
        # Modules that a config names are beside it; launch passes the search path to the workers.
        sys.path.insert(0, str(config_path.resolve().parent))
        launcher = find_launcher()
        stop = StopRequest()
        if launcher is None:
            stop.add_listener(_report_request)
            with stop_signals_handled(stop):
                ended = _train_launched(wanted, stop, force=force)
        else:
            handle_stop_signals(stop)
            ended = _train_joined(wanted, stop, launcher)
        _show(ended, [str(config_path), *(overrides or [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to train."""

    config: Config
    """The run."""
    run_dir: Path
    """Its directory."""
    resume: Resume | None
    """The checkpoint to resume from; None for a new run."""
    code: Path
    """The folder of the config."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a run ended; one process prints it."""

    run_dir: Path
    result: FitResult | StopResult
    is_shown_here: bool


def _train_launched(wanted: OpenRequest, stop: StopRequest, *, force: bool) -> _Ended:
    """Start workers, and return how the run ended."""
    config = wanted.config
    placement = place_workers(config.device_ids, workers=config.workers, force=force, max_workers=config.num_shards)
    config.check_workers(len(placement.devices))
    with ExitStack() as held:
        job = _open(wanted, held)
        _show_placement(placement, config)
        settings = LaunchSettings(
            workers=config.workers, devices=placement, threads_per_worker=config.threads_per_worker, stop=stop
        )
        with _cleaning_up(job.run_dir, stop):
            result, *_ = call_on_workers(train_worker, (job,), {}, settings)
    return _Ended(job.run_dir, result, is_shown_here=True)


def _train_joined(wanted: OpenRequest, stop: StopRequest, launcher: WorldVariables) -> _Ended:
    """Train as one of the workers that another launcher has started; rank 0 prints the result."""
    config = wanted.config
    world = join_started(config.device_ids)
    config.check_workers(world.world_size)
    with ExitStack() as held:
        job: Job = world.from_first(lambda: _open(wanted, held))
        if world.rank == 0:
            stop.add_listener(_report_request)
        with _cleaning_up(job.run_dir, stop) if world.rank == 0 else nullcontext():
            result, *_ = run_here(
                lambda run: _train(run, job, stop),
                launcher,
                workers=config.workers,
                devices=config.device_ids,
                threads=config.threads_per_worker,
                seed=0,
            )
    if isinstance(result, StopResult):
        ignore_stop_signals()
    return _Ended(job.run_dir, result, is_shown_here=world.rank == 0)


def train_worker(run: Run, job: Job) -> FitResult | StopResult:
    """Train in one worker that `lockstep train` has started."""
    stop = StopRequest()
    handle_stop_signals(stop)  # until the process ends: after training a request has no effect
    return _train(run, job, stop)


def _train(run: Run, job: Job, stop: StopRequest) -> FitResult | StopResult:
    """Train in one worker; rank 0 prints and records. If it is lost, another worker has its rank."""
    with ExitStack() as stack:
        metrics = MetricsFile(job.run_dir / METRICS_NAME, may_fail=job.config.on_save_error == "warn")
        recorder = Succession(lambda: run.rank == 0, metrics, lambda: _make_progress(stack))
        return fit(
            job.config,
            device=run.device,
            run_dir=job.run_dir,
            recorder=recorder,
            resume=job.resume,
            code=job.code,
            stop=stop,
        )


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
        _show_origin(opened)
        manifest = opened.origin.manifest
        before = opened.origin.run_dir
        if before is not None and before != opened.run_dir and (before / METRICS_NAME).exists():
            metrics.write_bytes((before / METRICS_NAME).read_bytes())
        MetricsFile(metrics).rewind(manifest.global_step)
        loss, weight = sum_epoch(metrics, manifest.epoch)
        resume = Resume(
            path=opened.origin.checkpoint,
            allowed=frozenset(wanted.allowed),
            epoch_loss=loss,
            epoch_weight=weight,
        )
    return Job(config=wanted.config, run_dir=opened.run_dir, resume=resume, code=Path(sys.path[0]))


def _show_origin(opened: OpenedRun) -> None:
    assert opened.origin is not None
    typer.echo(f"resuming from {opened.origin.checkpoint}")
    if opened.origin.manifest.config is None:
        typer.echo("  it was saved without a config, so changes of the config cannot be listed")
    for change in opened.changes:
        typer.echo(f"  {change}")


@contextmanager
def _cleaning_up(run_dir: Path, stop: StopRequest) -> Iterator[None]:
    """Draw the curves and remove an unused run directory, however the training ends."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if found := find_checkpoints(run_dir):
            interruption.add_note(f"To resume from {found[0]}, use --resume {run_dir}.")
        raise
    finally:
        Console().show_cursor()  # a worker that was stopped may have hidden it behind its progress bar
        if not stop.is_made:  # a run that is asked to stop may have no time to draw
            _draw(run_dir)
        discard_unused(run_dir)


def _show_placement(placement: Placement, config: Config) -> None:
    typer.echo(f"devices: {placement.reason}")
    if placement.hint and config.balance != "speed":
        typer.echo(f"hint: {placement.hint}")


def _make_progress(stack: ExitStack) -> Recorder:
    console = Console()
    return stack.enter_context(ProgressBar(console)) if console.is_terminal else PlainLines(console)


def _draw(run_dir: Path) -> None:
    metrics = run_dir / METRICS_NAME
    if not metrics.exists():
        return
    from lockstep.report.curves import draw_curves  # not at the top: importing matplotlib takes half a second

    try:
        draw_curves(metrics, run_dir / CURVES_NAME, run_dir.name)
    except OSError as error:  # this error must not hide how the run ended
        typer.echo(f"warning: {run_dir / CURVES_NAME} could not be written: {error}.", err=True)


def _show(ended: _Ended, arguments: Sequence[str]) -> None:
    """Print how the run ended, if this process is the one that prints; exit with 75 if the run was stopped."""
    if isinstance(ended.result, FitResult):
        if ended.is_shown_here:
            _show_result(ended.result, ended.run_dir)
        return
    if ended.is_shown_here:
        cursor, steps = ended.result.cursor, ended.result.num_steps
        where = f"after step {cursor.step} of {steps} of epoch {cursor.epoch + 1}"
        if cursor.step == 0:
            where = f"after epoch {cursor.epoch}"
        command = shlex.join(["lockstep", "train", *arguments, "--resume", str(ended.run_dir)])
        typer.echo(
            f"Stopped on request {where}. The run is saved in {ended.result.checkpoint}. Resume with: {command}",
            err=True,
        )
    raise typer.Exit(RESUME_EXIT)


def _show_result(result: FitResult, run_dir: Path) -> None:
    if result.finish is not None:
        typer.echo(f"\n{result.finish}\n")
    if result.num_right is not None:
        right, counted = int(result.num_right), int(result.num_test_samples)
        typer.echo(f"test accuracy {result.test['accuracy']:.2%} ({right:,} of {counted:,}, each counted once)")
    elif "loss" in result.test:
        typer.echo(f"test loss {result.test['loss']:.4f}")
    typer.echo(f"run directory {run_dir}")
    if not result.is_saved:
        typer.echo(
            "warning: the last checkpoint was not written, so the trained weights are not on the disk.", err=True
        )
    typer.echo(f"fingerprint {result.fingerprint}")
    typer.echo(f"digest {result.digest}")
