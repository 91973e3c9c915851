"""`lockstep train CONFIG`: train from a config file; the main job."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.checkpoint import Manifest, read_manifest
from lockstep.cli.failures import failures_shown
from lockstep.devices import choose_devices, count_gpus
from lockstep.errors import CheckpointError
from lockstep.events import NULL_RECORDER, Recorder, Recorders
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


def train(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, e.g. examples/digits.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run from its newest checkpoint.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")] = False,
) -> None:
    """Train the model of a config file."""
    with failures_shown(debug=debug):
        config = read_config(config_path, overrides or [])
        placement = choose_devices(
            config.device_ids, workers=config.workers, num_gpus=count_gpus(), max_workers=config.num_shards
        )
        config.check_workers(len(placement))
        # What a config names is found beside it; launch hands the search path on to the workers.
        sys.path.insert(0, str(config_path.resolve().parent))
        run_dir, checkpoint = _open_run(config, config_path.stem, resume=resume)
        try:
            first, *_ = launch(
                train_worker,
                config,
                run_dir,
                checkpoint,
                devices=_as_request(placement),
                threads_per_worker=config.threads_per_worker,
            )
        finally:
            Console().show_cursor()  # a worker that was stopped may have hidden it behind its progress bar
            _draw(run_dir)
            discard_unused(run_dir)
        _show_result(first, run_dir)


def train_worker(run: Run, config: Config, run_dir: Path, checkpoint: Path | None) -> FitResult:
    """Train in one worker; rank 0 shows and records."""
    with ExitStack() as stack:
        recorder = _make_recorder(run_dir, stack) if run.rank == 0 else NULL_RECORDER
        return fit(config, device=run.device, run_dir=run_dir, recorder=recorder, resume_from=checkpoint)


def _open_run(config: Config, name: str, *, resume: bool) -> tuple[Path, Path | None]:
    if not resume:
        run_dir = make_run_directory(config.run_dir, name)
        write_config(run_dir, config)
        return run_dir, None
    run_dir = find_run_directory(config.run_dir, name)
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


def _as_request(placement: tuple[str, ...]) -> str | list[int]:
    if placement[0] == "cpu":
        return f"cpu:{len(placement)}"
    return [int(device.partition(":")[2]) for device in placement]


def _make_recorder(run_dir: Path, stack: ExitStack) -> Recorder:
    console = Console()
    shown: Recorder = stack.enter_context(ProgressBar(console)) if console.is_terminal else PlainLines(console)
    return Recorders([MetricsFile(run_dir / METRICS_NAME), shown])


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
