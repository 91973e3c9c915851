"""`lockstep predict RUN --data mine:new -o out.csv`: what a saved model predicts, in the order of the data."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.main import FORCE, command
from lockstep.cli.options import CODE, DEVICES, OVERRIDES, SAVED, WEIGHTS, WORKERS, call_on_saved
from lockstep.errors import UsageError
from lockstep.launch.messages import Run
from lockstep.runs.opening import SavedRun, find_saved_run


def predict(
    saved_path: SAVED,
    overrides: OVERRIDES = None,
    data: Annotated[
        str, typer.Option("--data", help="test, train, or a function that returns a data set: mine:new.")
    ] = "test",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="NAME.csv, NAME.npz or NAME.parquet.")
    ] = Path("predictions.csv"),
    output_function: Annotated[
        str | None,
        typer.Option("--output-function", help="A function of the model's output; what it returns is written: mine:f."),
    ] = None,
    no_targets: Annotated[
        bool, typer.Option("--no-targets", help="Samples that are pairs are inputs, not (input, target).")
    ] = False,
    weights: WEIGHTS = None,
    workers: WORKERS = None,
    devices: DEVICES = None,
    force: FORCE = False,
    code: CODE = None,
) -> None:
    """Write what a saved model predicts for each sample, in the order of the data.

    The same bits on any number of workers. Started again after an interruption it continues where it was.
    """
    from lockstep.runs.predictions import (
        check_table_path,
        describe_job,
        find_parts,
        open_parts,
        remove_parts,
        write_table,
    )

    check_table_path(output)
    saved = find_saved_run(saved_path, overrides or [], workers=workers, devices=devices)
    parts = output.with_name(f"{output.name}.parts")
    job = describe_job(saved, data=data, weights=weights, output_function=output_function, has_targets=not no_targets)
    start = open_parts(parts, job)
    if start:
        typer.echo(f"continuing after {start:,} samples, which are in {parts}")
    num_samples = call_on_saved(
        predict_worker,
        saved,
        *(data, weights, output_function, not no_targets, parts.absolute(), start),
        code=code,
        force=force,
        is_quiet=False,
    )
    found = find_parts(parts)
    if not found or found[-1][1] != num_samples:
        raise UsageError(f"{parts} has changed meanwhile, and is not complete. Start the command again. (LS814)")
    write_table(output, [path for path, _ in found])
    remove_parts(parts)
    typer.echo(f"{output}: {num_samples:,} samples, predicted with {saved.checkpoint}, {saved.where}")


def predict_worker(
    run: Run,
    saved: SavedRun,
    data: str,
    weights: str | None,
    transform: str | None,
    has_targets: bool,
    parts: Path,
    start: int,
) -> int:
    from lockstep.runs.predict import PredictRequest, predict_saved

    def tell(done: int, num_samples: int | None) -> None:
        typer.echo(f"{done:,} samples" if num_samples is None else f"{done:,} of {num_samples:,} samples")

    request = PredictRequest(
        config=saved.config,
        checkpoint=saved.checkpoint,
        data=data,
        weights=weights,
        transform=transform,
        is_classifier="accuracy" in saved.metrics,
        has_targets=has_targets,
        parts=parts,
        start=start,
    )
    return predict_saved(request, run.device, tell)


COMMAND = command(predict)
