"""`lockstep evaluate RUN`: the metrics of a saved model on a data set."""

import json
from dataclasses import asdict
from typing import Any

import typer

from lockstep.cli.main import FORCE, JSON, command
from lockstep.cli.options import CODE, DATA, DEVICES, OVERRIDES, SAVED, WEIGHTS, WORKERS, call_on_saved
from lockstep.launch.messages import Run
from lockstep.runs.opening import SavedRun, find_saved_run


def evaluate(
    saved_path: SAVED,
    overrides: OVERRIDES = None,
    data: DATA = None,
    weights: WEIGHTS = None,
    workers: WORKERS = None,
    devices: DEVICES = None,
    force: FORCE = False,
    code: CODE = None,
    as_json: JSON = False,
) -> None:
    """Evaluate a saved model: every sample once, with the same bits on any number of workers.

    Of a run directory the newest checkpoint is taken; name RUN/best.ckpt for the best one.
    """
    saved = find_saved_run(saved_path, overrides or [], workers=workers, devices=devices)
    found = call_on_saved(evaluate_worker, saved, data, weights, code=code, force=force, is_quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(saved.checkpoint), **found}, indent=2))
        return
    typer.echo(f"checkpoint {saved.checkpoint}, {saved.where}")
    for name, value in found["metrics"].items():
        typer.echo(f"{found['data']} {_describe(name, value, found['weights'][name])}")
    number = found["num_samples"]
    typer.echo(f"each {'sample' if number is None else f'of {number:,} samples'} was counted once")
    typer.echo(f"fingerprint {found['fingerprint']}")
    typer.echo(f"digest {found['digest']}")


def evaluate_worker(run: Run, saved: SavedRun, data: str | None, weights: str | None) -> dict[str, Any]:
    from lockstep.runs.evaluate import evaluate_saved

    return asdict(evaluate_saved(saved.config, saved.checkpoint, data, run.device, weights))


def _describe(name: str, value: float, weight: float) -> str:
    if name == "accuracy":
        return f"{name} {value:.2%} ({round(value * weight):,} of {round(weight):,})"
    return f"{name} {value:.6g}"


COMMAND = command(evaluate)
