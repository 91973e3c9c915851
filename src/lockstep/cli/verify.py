"""`lockstep verify CONFIG --workers 1,2,3`: check that every number of workers trains the same weights, bit for bit."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import FORCE, command
from lockstep.cli.options import complete_config, find_config, place_run
from lockstep.cli.verify_script import verify_script
from lockstep.devices import Placement, parse_request, place_workers, resized
from lockstep.errors import UsageError, counted
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run
from lockstep.runs.config import Config, read_config
from lockstep.runs.verify import ShortRun, find_deviating_rank, run_steps

_SHOWN_DIGITS = 16
_COUNTS, _STEPS = "1,2", 20
_COUNTS_OF_SCRIPT, _BATCHES_OF_SCRIPT = "1,2,3", 50
CONFIG_OR_SCRIPT = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG|SCRIPT", help="A YAML file, an example, or a .py script.", autocompletion=complete_config
    ),
]
VALUES_OR_ARGUMENTS = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE|ARGS", help="Values that replace the file's; arguments of the script, after --."),
]


def verify(
    given: CONFIG_OR_SCRIPT,
    overrides: VALUES_OR_ARGUMENTS = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", help="Numbers to compare; a single one is run twice.  [default: 1,2; of a script 1,2,3]"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps to train with each number.  [default: 20]  Of a script: after how many batches a pass "
            "over a loader ends.  [default: 50]",
        ),
    ] = None,
    force: FORCE = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings in a script for programs.")] = False,
) -> None:
    """Train a config on several numbers of workers and compare the weights; or say what in a script depends on them.

    Exit code 0 if the weights are equal after every step, or the script has no mistakes, 1 if not. A script is run as
    it is, on CPUs; files that it writes are put back.
    """
    if given.suffix == ".py" and not given.exists():
        raise UsageError(f"There is no script {given}. Name a script that is there, or a config: mine.yaml. (LS549)")
    if given.suffix == ".py":
        counts = sorted(set(_read_counts(workers or _COUNTS_OF_SCRIPT)))
        verify_script(given, overrides or [], counts, steps or _BATCHES_OF_SCRIPT, as_json=as_json)
        return
    workers, steps = workers or _COUNTS, steps or _STEPS
    config_path = find_config(given)
    config = read_config(config_path, overrides or [])
    _, config = place_run(config, force=force)  # with the shards that a run has on this machine
    counts = _read_counts(workers)
    for count in counts:
        config.check_workers(count)
    sys.path.insert(0, str(config_path.resolve().parent))
    placement = place_workers(resized(parse_request(config.device_ids), max(counts)), force=force)
    typer.echo(f"devices: {placement.reason}", err=True)
    if not _compare(config, placement, counts, steps):
        raise typer.Exit(FAILURE_EXIT)


def verify_worker(run: Run, config: Config, num_steps: int, reference: Path, is_first: bool) -> ShortRun:
    return run_steps(config, run.device, num_steps, reference, is_first=is_first)


def _compare(config: Config, placement: Placement, counts: Sequence[int], num_steps: int) -> bool:
    runs: dict[str, ShortRun] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as reference:
        for number, count in enumerate(counts):
            before = counts[:number].count(count)
            label = (
                counted(count, "worker") + (", again" if before else "") + (f" ({before + 1})" if before > 1 else "")
            )
            typer.echo(f"{label}: {num_steps} steps ...", err=True)
            ranks = _run(config, placement.first(count), num_steps, Path(reference), is_first=number == 0)
            runs[label] = ranks[0]
            odd_rank = find_deviating_rank(ranks)
            if odd_rank is not None:
                runs[f"{label}, rank {odd_rank}"] = ranks[odd_rank]
                _show_table(runs)
                _explain_odd_rank(label, ranks[0], odd_rank, ranks[odd_rank])
                return False
        _show_table(runs)
        odd = next((label for label, run in runs.items() if run.difference is not None), None)
        if odd is None:
            first = next(iter(runs.values()))
            typer.echo(f"fingerprint {first.fingerprint}")
            typer.echo(f"equal after each of {num_steps} steps: {'; '.join(runs)}")
            typer.echo(f"digest {first.digests[-1]}")
            return True
        reference_label = next(iter(runs))
        again = next((run for label, run in runs.items() if label.startswith(f"{reference_label}, again")), None)
        if again is None:
            typer.echo(f"{reference_label}, again, to see whether it is reproducible ...", err=True)
            again = _run(config, placement.first(counts[0]), num_steps, Path(reference), is_first=False)[0]
    _explain(runs, odd, again)
    return False


def _run(config: Config, placement: Placement, num_steps: int, reference: Path, *, is_first: bool) -> list[ShortRun]:
    return launch(
        verify_worker,
        config,
        num_steps,
        reference,
        is_first,
        devices=placement,
        threads_per_worker=config.threads_per_worker,
        portable=config.portable,
    )


def _read_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"--workers is {text!r}, expected numbers of workers such as 1,2,3. (LS821)")
    return counts * 2 if len(counts) == 1 else counts


def _show_table(runs: Mapping[str, ShortRun]) -> None:
    table = Table("after step")
    for label in runs:
        table.add_column(label)
    for step, digests in enumerate(zip(*(run.digests for run in runs.values()), strict=True), start=1):
        cells = [digest[:_SHOWN_DIGITS] + ("" if digest == digests[0] else " !") for digest in digests]
        table.add_row(str(step), *cells)
    Console().print(table)


def _explain_odd_rank(label: str, first: ShortRun, rank: int, odd: ShortRun) -> None:
    typer.echo(f"fingerprint {odd.fingerprint}")
    for name, run in ((f"rank {rank}", odd), ("rank 0", first)):
        if run.difference is not None:
            typer.echo(f"NOT equal: {label}, {name}, against the first run: {run.difference}.")
    typer.echo(
        f"The workers of one run have different weights: with {label}, rank {rank} differs from rank 0. All "
        "workers apply the same gradients to the same parameters, so look for code that does something else on each "
        "worker: an optimizer that draws random numbers, a forward or a hook that writes to parameters, or code that "
        "depends on the rank."
    )


def _explain(runs: Mapping[str, ShortRun], odd: str, again: ShortRun) -> None:
    reference, first = next(iter(runs.items()))
    other = runs[odd]
    differences = first.fingerprint.differences(other.fingerprint)
    if differences:
        typer.echo(
            f"{reference} and {odd} were run under different conditions, which change the last bits: "
            f"{'; '.join(differences)}."
        )
    typer.echo(f"fingerprint {first.fingerprint}")
    typer.echo(f"NOT equal: {odd} against {reference}: {other.difference}.")
    if again.difference is None:
        typer.echo(f"Two runs with {reference} give the same bits: the difference comes from the number of workers.")
        return
    where = "" if again is other else f" as well; {again.difference}"
    typer.echo(
        f"Two runs with {reference} differ{where}. The run is not reproducible with any number of workers. Look for an "
        "operator without a deterministic form (deterministic: true refuses those), for random numbers from a "
        "generator that is not seeded in each step, or for code that depends on time or on threads."
    )


COMMAND = command(verify)
