"""`lockstep train CONFIG`: train from a config file; the main job."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.checkpoint import Manifest, read_manifest
from lockstep.cli.failures import failures_shown
from lockstep.devices import DeviceRequest, Placement, place_workers
from lockstep.errors import CheckpointError
from lockstep.events import NULL_RECORDER, Recorder, Recorders
from lockstep.launch.joined import find_launcher, join_started
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run
from lockstep.report import MetricsFile, PlainLines, ProgressBar
from lockstep.train.config import Config, read_config
from lockstep.train.fit import FitResult, fit
from lockstep.train.run_directory import (
    CURVES_NAME,
    METRICS_NAME,
    check_same_run,
    discard_unused,
    find_checkpoints,
    find_run_directory,
    make_run_directory,
    write_config,
)
from lockstep.train.run_lock import locked_run


def train(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, e.g. examples/digits.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run from its newest checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Take GPUs that others hold, too.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")] = False,
) -> None:
    """Train the model of a config file."""
    with failures_shown(debug=debug):
        config = read_config(config_path, overrides or [])
        # What a config names is found beside it; launch hands the search path on to the workers.
        sys.path.insert(0, str(config_path.resolve().parent))
        if find_launcher() is None:
            _train_launched(config, config_path.stem, resume=resume, force=force)
        else:
            _train_joined(config, config_path.stem, resume=resume)


def _train_launched(config: Config, name: str, *, resume: bool, force: bool) -> None:
    """Start workers, and show what they come to."""
    placement = place_workers(config.device_ids, workers=config.workers, force=force, max_workers=config.num_shards)
    config.check_workers(len(placement.devices))
    with ExitStack() as held:
        run_dir, checkpoint = _open_run(config, name, held, resume=resume)
        _show_placement(placement, config)
        with _closing(run_dir):
            result = _launch(config, run_dir, checkpoint, placement)
    _show_result(result, run_dir)


def _train_joined(config: Config, name: str, *, resume: bool) -> None:
    """Be one of the workers that another launcher has started; the first one shows what they come to."""
    world = join_started(config.device_ids)
    config.check_workers(world.world_size)
    with ExitStack() as held:
        run_dir, checkpoint = world.from_first(lambda: _open_run(config, name, held, resume=resume))
        with _closing(run_dir) if world.rank == 0 else nullcontext():
            result = _launch(config, run_dir, checkpoint, config.device_ids)
    if world.rank == 0:
        _show_result(result, run_dir)


def _launch(config: Config, run_dir: Path, checkpoint: Path | None, devices: DeviceRequest | Placement) -> FitResult:
    result: FitResult
    result, *_ = launch(
        train_worker,
        config,
        run_dir,
        checkpoint,
        Path(sys.path[0]),  # the folder of the config, see `train`
        workers=config.workers,
        devices=devices,
        threads_per_worker=config.threads_per_worker,
    )
    return result


@contextmanager
def _closing(run_dir: Path) -> Iterator[None]:
    """Leave the run's directory in order, however the training ends."""
    try:
        yield
    finally:
        Console().show_cursor()  # a worker that was stopped may have hidden it behind its progress bar
        _draw(run_dir)
        discard_unused(run_dir)


def train_worker(run: Run, config: Config, run_dir: Path, checkpoint: Path | None, code: Path) -> FitResult:
    """Train in one worker; rank 0 shows and records."""
    with ExitStack() as stack:
        recorder = _make_recorder(config, run_dir, stack) if run.rank == 0 else NULL_RECORDER
        return fit(config, device=run.device, run_dir=run_dir, recorder=recorder, resume_from=checkpoint, code=code)


def _open_run(config: Config, name: str, held: ExitStack, *, resume: bool) -> tuple[Path, Path | None]:
    """Return the run's directory, locked for as long as `held` is open, and the checkpoint to go on from."""
    if not resume:
        run_dir = make_run_directory(config.run_dir, name)
        held.enter_context(locked_run(run_dir))
        write_config(run_dir, config)
        return run_dir, None
    run_dir = find_run_directory(config.run_dir, name)
    held.enter_context(locked_run(run_dir))
    checkpoint, manifest = _newest_whole(run_dir)
    check_same_run(manifest, config)
    write_config(run_dir, config)
    MetricsFile(run_dir / METRICS_NAME).rewind(manifest.global_step)
    return run_dir, checkpoint


def _newest_whole(run_dir: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint that can be read, with a warning for each newer one that cannot."""
    checkpoints = find_checkpoints(run_dir)
    for path in checkpoints:
        try:
            return path, read_manifest(path)
        except CheckpointError as error:
            if path == checkpoints[-1]:
                raise
            typer.echo(f"warning: {error} Going on from the one before.", err=True)
    raise AssertionError("find_run_directory returns only runs with a checkpoint")


def _show_placement(placement: Placement, config: Config) -> None:
    typer.echo(f"devices: {placement.reason}")
    if placement.hint and config.balance != "speed":
        typer.echo(f"hint: {placement.hint}")


def _make_recorder(config: Config, run_dir: Path, stack: ExitStack) -> Recorder:
    console = Console()
    shown: Recorder = stack.enter_context(ProgressBar(console)) if console.is_terminal else PlainLines(console)
    metrics = MetricsFile(run_dir / METRICS_NAME, may_fail=config.on_save_error == "warn")
    return Recorders([metrics, shown])


def _draw(run_dir: Path) -> None:
    metrics = run_dir / METRICS_NAME
    if not metrics.exists():
        return
    from lockstep.report.curves import (
        draw_curves,
    )  # not at the top: matplotlib takes half a second, whatever the command

    try:
        draw_curves(metrics, run_dir / CURVES_NAME, run_dir.name)
    except OSError as error:  # a picture is not worth hiding how the run ended
        typer.echo(f"warning: {run_dir / CURVES_NAME} could not be written: {error}.", err=True)


def _show_result(result: FitResult, run_dir: Path) -> None:
    if result.finish is not None:
        typer.echo(f"\n{result.finish}\n")
    if result.num_right is not None:
        right, counted = int(result.num_right), int(result.num_test_samples)
        typer.echo(f"test accuracy {result.test['accuracy']:.2%} ({right:,} of {counted:,}, each counted once)")
    elif "loss" in result.test:
        typer.echo(f"test loss {result.test['loss']:.4f}")
    typer.echo(f"run directory {run_dir}")
    typer.echo(f"fingerprint {result.fingerprint}")
    typer.echo(f"digest {result.digest}")
