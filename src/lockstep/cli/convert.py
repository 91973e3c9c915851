"""`lockstep checkpoint convert SOURCE TARGET`: write the weights of any known checkpoint in a common format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lockstep.checkpoint.interop.convert import convert_weights
from lockstep.cli.failures import failures_shown

_MEGABYTE = 1_000_000


class Target(StrEnum):
    pt = "pt"
    safetensors = "safetensors"
    dcp = "dcp"


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint: a file, a folder of shards, or a run directory.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="What to write: NAME.pt, NAME.safetensors or NAME.dcp (a folder).")
    ],
    to: Annotated[Target | None, typer.Option("--to", help="The format, if TARGET's name does not show it.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="Which weights to take: a key in the file (ema), or the beginning of names (model)."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input too.")] = False,
) -> None:
    """Write the weights of a checkpoint as plain .pt, safetensors or a folder of torch.distributed.checkpoint.

    Nothing in SOURCE is executed. Prefixes that DataParallel, DistributedDataParallel and torch.compile add to names
    are dropped.
    """
    with failures_shown(debug=debug):
        done = convert_weights(source, target, to.value if to else None, key=key, force=force)
        typer.echo(f"{source}: {done.recognised}")
        size = f"{done.num_bytes / _MEGABYTE:.1f} MB" if done.num_bytes >= _MEGABYTE else f"{done.num_bytes} bytes"
        typer.echo(f"{target}: {done.form}, {done.num_tensors} tensors, {size}")
