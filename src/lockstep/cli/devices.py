"""`lockstep devices`: list the GPUs, the processes that use them, and which ones a request would get now.

With `--test`, start a worker on each of the devices that a request gets, and check that they add up correctly.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.failures import FAILURE_EXIT, failures_shown
from lockstep.cli.link_test import are_right, as_document, check_placement, show_links
from lockstep.cli.main import DEBUG, command
from lockstep.devices import Gpu, Holder, Inventory, Placement, choose_devices, place_workers, take_inventory
from lockstep.devices.choose import find_unseen_bytes
from lockstep.devices.inventory import describe_bytes, describe_holder, gpu_number
from lockstep.errors import DeviceError, UsageError

_DEFAULT_REQUESTS = ("auto", "auto:3")
_WIDTH_IN_FILES = 160


def devices(
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="REQUEST", help="What to try: auto:2, auto:3@20GiB, 0,2 ... Default: auto auto:3"),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Check sums over every pair of devices of one REQUEST (default: auto).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --test: take GPUs that others use, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    debug: DEBUG = False,
) -> None:
    """Show the GPUs, the processes that use them, the CPU, and what `auto` would take right now.

    The exit code is 0, also where there is no GPU. With --test it is 1 if a sum was wrong or a call did not end.
    """
    with failures_shown(debug=debug):
        if test:
            raise typer.Exit(_test(requests or ["auto"], force=force, as_json=as_json))
        inventory = take_inventory()
        answers = [(request, _try(request, inventory)) for request in requests or _DEFAULT_REQUESTS]
        if as_json:
            typer.echo(json.dumps(_as_document(inventory, answers), indent=2, default=_as_text))
        else:
            _show(inventory, answers)


def _test(requests: list[str], *, force: bool, as_json: bool) -> int:
    """Check the links between the devices of a request; return the exit code."""
    if len(requests) != 1:
        raise UsageError(f"--test takes one request, but {len(requests)} are given: {' '.join(requests)}. (LS821)")
    placement = place_workers(requests[0], force=force)
    if len(placement.devices) == 1:
        raise UsageError(f"--test needs two devices or more, but the request gets one: {placement.reason}. (LS821)")
    if not as_json:
        typer.echo(f"devices: {placement.reason}")
    links = check_placement(placement)
    if as_json:
        document = {"devices": [asdict(device) for device in placement.devices], "links": as_document(links)}
        typer.echo(json.dumps(document, indent=2))
    else:
        show_links(links, placement)
    return 0 if are_right(links) else FAILURE_EXIT


def _try(request: str, inventory: Inventory) -> Placement | DeviceError:
    try:
        return choose_devices(request, inventory=inventory)
    except DeviceError as error:
        return error


def _as_document(inventory: Inventory, answers: Iterable[tuple[str, Placement | DeviceError]]) -> dict[str, Any]:
    """Return what `--json` prints: the fields of an inventory, and `requests`."""
    tried: list[dict[str, Any]] = []
    for request, answer in answers:
        if isinstance(answer, DeviceError):
            tried.append({"request": request, "devices": [], "reason": None, "hint": None, "refused": str(answer)})
        else:
            tried.append({"request": request, **asdict(answer), "refused": None})
    return {**asdict(inventory), "requests": tried}


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    raise TypeError(f"{value!r} cannot be written as JSON.")


def _show(inventory: Inventory, answers: Iterable[tuple[str, Placement | DeviceError]]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_IN_FILES
    if inventory.gpus:
        console.print(_gpu_table(inventory))
    if inventory.problem:
        typer.echo(f"No GPU can be used: {inventory.problem}.")
    typer.echo(
        f"CPU: {inventory.num_cores} cores, {describe_bytes(inventory.memory_available_bytes)} of "
        f"{describe_bytes(inventory.memory_total_bytes)} free"
    )
    for request, answer in answers:
        if isinstance(answer, DeviceError):
            typer.echo(f"{request} would be refused: {answer}")
        else:
            typer.echo(f"{request} would take {answer.reason}")
            if answer.hint:
                typer.echo(f"  {answer.hint}")


def _gpu_table(inventory: Inventory) -> Table:
    table = Table("GPU", "name", "free", "of", "load", "held by")
    for gpu in inventory.gpus:
        load = "?" if gpu.utilisation_percent is None else f"{gpu.utilisation_percent} %"
        table.add_row(
            gpu_number(gpu),
            Text(gpu.name),
            describe_bytes(gpu.memory_free_bytes),
            describe_bytes(gpu.memory_total_bytes),
            load,
            Text("\n".join(_remarks(gpu, inventory))),
        )
    return table


def _remarks(gpu: Gpu, inventory: Inventory) -> list[str]:
    remarks = [_describe(holder, inventory) for holder in gpu.holders]
    if unseen := find_unseen_bytes(gpu, inventory):
        remarks.append(f"a process that cannot be seen from here ({describe_bytes(unseen)})")
    if not gpu.is_visible:
        remarks.append(f"hidden by CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices}")
    if gpu.problem:
        remarks.append(f"cannot be used: {gpu.problem}")
    return remarks


def _describe(holder: Holder, inventory: Inventory) -> str:
    kind = ", graphics only" if holder.is_graphics else ""
    memory = "" if holder.memory_bytes is None else f" ({describe_bytes(holder.memory_bytes)}{kind})"
    return describe_holder(holder, inventory) + memory


COMMAND = command(devices)
