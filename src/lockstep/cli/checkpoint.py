"""`lockstep checkpoint show|verify|convert`: show what a file holds, check it for damage, convert its weights."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.inspection import CheckpointContents, VerificationResult, show_checkpoint, verify_checkpoint
from lockstep.checkpoint.interop.convert import convert_weights
from lockstep.checkpoint.step_files import checkpoints_at
from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import JSON, table_console, with_failures_shown
from lockstep.errors import CheckpointError

_MEGABYTE = 1_000_000
_STATES = ("callbacks", "extra", "parts")
"""What a manifest of format 4 or later holds by name; the names are shown, because the states are long."""
_Path = Annotated[Path, typer.Argument(metavar="FILE|RUN_DIR", help="A checkpoint, or the directory of a run.")]


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
) -> None:
    """Write the weights of a checkpoint as plain .pt, safetensors or a folder of torch.distributed.checkpoint.

    Nothing in SOURCE is executed. Prefixes that DataParallel, DistributedDataParallel and torch.compile add to names
    are dropped.
    """
    done = convert_weights(source, target, to.value if to else None, key=key, force=force)
    typer.echo(f"{source}: {done.recognised}")
    size = f"{done.num_bytes / _MEGABYTE:.1f} MB" if done.num_bytes >= _MEGABYTE else f"{done.num_bytes} bytes"
    typer.echo(f"{target}: {done.form}, {done.num_tensors} tensors, {size}")


def show(path: _Path, as_json: JSON = False) -> None:
    """Show what is in a checkpoint: progress and config of the run, and its tensors. For a directory: in the newest.

    The tensors themselves are not read: `lockstep checkpoint verify` compares them with their checksums.
    """
    contents = show_checkpoint(checkpoints_at(path)[0])
    if as_json:
        typer.echo(json.dumps(_as_document(contents), indent=2))
    else:
        _show(contents)
        typer.echo(f"The tensors were not read. To check them: lockstep checkpoint verify {shlex.quote(str(path))}")


def verify(path: _Path, as_json: JSON = False) -> None:
    """Compare every byte with the checksums, and the weights with the digest. For a directory: all its checkpoints.

    Exit code 0 if all are equal; 1 if anything is damaged, or cannot be read as a checkpoint at all; 2 if there is no
    such file, or it is whole, but of another program or of a later format.
    """
    found: list[VerificationResult] = []
    unknown: list[CheckpointError] = []
    for each in checkpoints_at(path):
        try:
            found.append(verify_checkpoint(each))
        except CheckpointError as error:  # the other files are still checked
            unknown.append(error)
    if as_json and found:
        entries = [{**asdict(each), "path": str(each.path), "is_whole": each.is_intact} for each in found]
        typer.echo(json.dumps({"checkpoints": entries}, indent=2))
    else:
        for result in found:
            typer.echo(str(result))
            for name in result.damaged:
                typer.echo(f"  damaged: {_printable(name)}")
    if unknown:
        raise unknown[0]
    if not all(result.is_intact for result in found):
        raise typer.Exit(FAILURE_EXIT)


def _as_document(contents: CheckpointContents) -> dict[str, Any]:
    values = asdict(contents.manifest)
    for key in ("optimizer", "scheduler", "scaler", "model_extra", "checksums"):  # long, and of no use to a reader
        del values[key]
    values |= {key: list(values[key] or ()) for key in _STATES}
    groups = [asdict(group) for group in contents.groups]
    return {"path": str(contents.path), "num_bytes": contents.num_bytes, **values, "groups": groups}


def _show(contents: CheckpointContents) -> None:
    console = table_console()
    facts = Table(show_header=False, box=None)
    for name, text in _facts(contents):
        facts.add_row(name, Text(_printable(text)))
    console.print(facts)
    table = Table("tensors", "of", "how many", "elements", "dtype", "size")
    for group in contents.groups:
        table.add_row(
            Text(_printable(group.name)),
            "model" if group.is_model else "optimizer",
            str(group.num_tensors),
            f"{group.num_elements:,}",
            ", ".join(group.dtypes),
            _describe_size(group.num_bytes),
        )
    console.print(table)


def _facts(contents: CheckpointContents) -> list[tuple[str, str]]:
    manifest = contents.manifest
    fingerprint = manifest.fingerprint or {"shards": manifest.num_shards, "seed": manifest.seed}
    states = {key: ", ".join(getattr(manifest, key) or ()) for key in _STATES}
    lines = {
        "file": f"{contents.path}, {_describe_size(contents.num_bytes)}, format {manifest.format_version}",
        "progress": f"{manifest.global_step} updates done; next is epoch {manifest.epoch}, step {manifest.step} "
        "(counted from 0)",
        "digest": manifest.digest,
        "fingerprint": _listed(fingerprint),
        "test": _listed(manifest.metrics),
        **states,
        "loader": manifest.loader or "",
        "versions": _listed(manifest.versions),
        "config": _listed(manifest.config or {}),
    }
    return [(name, text) for name, text in lines.items() if text]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, {}))


def _printable(text: str) -> str:
    """Return text from a file with control characters escaped, because a terminal would act on them."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _describe_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


COMMAND = typer.Typer(
    name="checkpoint", help="Look into checkpoint files, and convert them.", no_args_is_help=True, rich_markup_mode=None
)
for _function in (convert, show, verify):
    COMMAND.command()(with_failures_shown(_function))
