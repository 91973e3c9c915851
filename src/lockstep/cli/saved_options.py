"""What `lockstep evaluate` and `lockstep predict` have in common: their options, and calling workers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.devices import place_workers
from lockstep.launch.launcher import LaunchSettings, call_on_workers
from lockstep.runs.opening import SavedRun, search_path

SAVED = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run directory, or a checkpoint.")]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the run's config.")
]
WORKERS = Annotated[int | None, typer.Option("--workers", min=1, help="Number of workers.  [default: the config's]")]
DEVICES = Annotated[str | None, typer.Option("--devices", help="As device_ids in a config.  [default: the config's]")]
FORCE = Annotated[bool, typer.Option("--force", help="Take GPUs that others hold, too.")]
CODE = Annotated[
    Path | None,
    typer.Option("--code", help="The folder of the modules that the config names.  [default: that of the run]"),
]
WEIGHTS = Annotated[
    str | None, typer.Option("--weights", help="ema or swa: the averaged weights of the checkpoint, not its own.")
]
DEBUG = Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")]


def call_on_saved(
    function: Callable[..., Any], saved: SavedRun, *arguments: Any, code: Path | None, force: bool, is_quiet: bool
) -> Any:
    """Call `function(run, saved, *arguments)` in workers; return rank 0's result. `is_quiet`: stdout has only that."""
    config = saved.config
    sys.path[:0] = search_path(saved, code)
    placement = place_workers(config.device_ids, workers=config.workers, force=force, max_workers=config.num_shards)
    config.check_workers(len(placement.devices))
    typer.echo(f"devices: {placement.reason}", err=is_quiet)
    settings = LaunchSettings(devices=placement, threads_per_worker=config.threads_per_worker)
    return call_on_workers(function, (saved, *arguments), {}, settings)[0]
