"""`lockstep run SCRIPT ARGS`: start any script once per worker, as torchrun does on one host."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.main import FORCE, command
from lockstep.devices import place_workers
from lockstep.errors import UsageError
from lockstep.launch.exits import GRACE_SECONDS
from lockstep.launch.output import print_message
from lockstep.launch.scripts import ScriptJob, python_program, run_with_restarts

CONTEXT = {"allow_interspersed_args": False}
"""Settings of the command: everything after SCRIPT is an argument of the script."""
_ONE_HOST = frozenset({"1", "1:1"})


def _refuse_several_hosts(given: str | None) -> None:
    if given is not None:
        raise typer.BadParameter(
            "`lockstep run` starts workers on one host and picks the port itself. It has no options for other hosts, "
            "addresses, ports or a rendezvous. Leave this option out. For several hosts, start the script with "
            "torchrun or Slurm; Lockstep reads their environment variables. (LS126)"
        )


def _refuse_hosts(given: str | None) -> None:
    if given not in _ONE_HOST:
        _refuse_several_hosts(given)


def main() -> None:
    """Run this command without importing the other commands."""
    COMMAND(sys.argv[2:], prog_name="lockstep run")


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; a module with -m.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the script; no options of lockstep run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "--nproc-per-node",
            "--nproc_per_node",
            help="How many workers; each has its own GPU if there are GPUs.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="auto, auto:3, auto:3@20GiB, cpu, cpu:2, GPU numbers such as 0,2,5, UUIDs.  [default: auto]"),
    ] = None,
    force: FORCE = False,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(min=1, help="OMP_NUM_THREADS.  [default: its value, or cores / workers]"),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="Compute the same bits on every x86-64 processor: on CPUs, in 1 thread.")
    ] = False,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", "--no_python", help="SCRIPT is an executable.")] = False,
    drop_in: Annotated[
        bool, typer.Option("--drop-in", help="Use Lockstep's classes in place of torch's, in a script without them.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir", "--log_dir", help="Also write output to rank-0.stdout.log, rank-0.stderr.log, ... there."
        ),
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not put [rank 1] in front of lines.")] = False,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds from the signal that stops the workers to SIGKILL.")
    ] = GRACE_SECONDS,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", "--max_restarts", min=0, help="How often to start all workers again after a failure."
        ),
    ] = 0,
    pass_local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Pass --local-rank=N to the script, as torch.distributed.launch did.")
    ] = False,
    pass_local_rank_underscore: Annotated[
        bool, typer.Option("--local_rank", help="Pass --local_rank=N to the script.")
    ] = False,
    virtual_local_rank: Annotated[
        bool,
        typer.Option(
            "--virtual-local-rank", "--virtual_local_rank", help="Each worker sees its own GPU alone, LOCAL_RANK 0."
        ),
    ] = False,
    _standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    _nnodes: Annotated[str | None, typer.Option("--nnodes", hidden=True, callback=_refuse_hosts)] = None,
    _several_hosts: Annotated[
        str | None,
        typer.Option(
            *("--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port", "--master_port"),
            *("--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-id", "--rdzv_id"),
            *("--rdzv-conf", "--rdzv_conf", "--local-addr", "--local_addr"),
            hidden=True,
            callback=_refuse_several_hosts,
        ),
    ] = None,
) -> None:
    """Start a script once per worker on this host, as torchrun does."""
    job = ScriptJob(
        program=_find_program(script, is_module=is_module, no_python=no_python),
        arguments=tuple(arguments or ()),
        placement=place_workers(devices, workers=workers, force=force),
        num_threads=threads_per_worker,
        portable=portable,
        own_card_only=virtual_local_rank,
        local_rank_option="--local_rank" if pass_local_rank_underscore else "--local-rank" * pass_local_rank,
        has_prefix=not no_prefix,
        log_dir=log_dir,
        drop_in=drop_in,
        max_restarts=max_restarts,
        grace_seconds=grace,
    )
    typer.echo(job.describe(), err=True)
    ending = run_with_restarts(job, print_message)
    if ending.message:
        print_message(ending.message)
    raise typer.Exit(ending.exit_code)


def _find_program(script: str, *, is_module: bool, no_python: bool) -> tuple[str, ...]:
    if no_python:
        if is_module:
            raise UsageError(
                "-m and --no-python contradict each other: a module needs Python. Leave one of them out. (LS126)"
            )
        found = shutil.which(script)
        if found is None:
            raise UsageError(
                f"{script} is not an executable file, and PATH has no executable of that name. Name an executable "
                "(`chmod +x FILE` makes a file executable), or leave out --no-python to run a Python script. (LS126)"
            )
        return (found,)
    path = Path(script)
    if not is_module and not (path.is_file() or (path / "__main__.py").is_file()):
        what = "is a directory without a __main__.py" if path.is_dir() else "does not exist"
        raise UsageError(
            f"The script {script} {what}; expected a Python file. For a module use -m, as in -m package.train. (LS126)"
        )
    return python_program(script, is_module=is_module)


COMMAND = command(run, context_settings=CONTEXT)
