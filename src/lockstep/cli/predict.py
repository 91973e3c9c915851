"""`lockstep predict RUN --data mine:new -o out.csv`: what a saved model predicts, in the order of the data."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.main import FORCE, command
from lockstep.cli.options import CODE, DATA, DEVICES, OVERRIDES, SAVED, WEIGHTS, WORKERS, call_on_saved
from lockstep.errors import UsageError
from lockstep.launch.messages import Run
from lockstep.runs.opening import SavedRun, find_saved_run

if TYPE_CHECKING:
    from lockstep.runs.predictions import PredictRequest


def predict(
    saved_path: SAVED,
    overrides: OVERRIDES = None,
    data: DATA = None,
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
        PredictRequest,
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
    request = PredictRequest(
        saved=saved,
        data=data,
        weights=weights,
        output_function=output_function,
        has_targets=not no_targets,
        parts=parts.absolute(),
    )
    start = open_parts(parts, describe_job(request))
    if start:
        typer.echo(f"continuing after {start:,} samples, which are in {parts}")
    request = replace(request, start=start)
    num_samples = call_on_saved(predict_worker, saved, request, code=code, force=force, is_quiet=False)
    found = find_parts(parts)
    if not found or found[-1][1] != num_samples:
        raise UsageError(f"{parts} has changed meanwhile, and is not complete. Start the command again. (LS814)")
    write_table(output, [path for path, _ in found])
    remove_parts(parts)
    typer.echo(f"{output}: {num_samples:,} samples, predicted with {saved.checkpoint}, {saved.where}")


def predict_worker(run: Run, _saved: SavedRun, request: "PredictRequest") -> int:
    from lockstep.runs.predict import predict_saved

    def tell(done: int, num_samples: int | None) -> None:
        typer.echo(f"{done:,} samples" if num_samples is None else f"{done:,} of {num_samples:,} samples")

    return predict_saved(request, run.device, tell)


COMMAND = command(predict)
