"""`lockstep devices`: list the GPUs, the processes that use them, and which ones a request would get now.

With `--test`, start a worker on each of the devices that a request gets, and check that they add up correctly.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text

from lockstep.cli.failures import FAILURE_EXIT
from lockstep.cli.main import JSON, command, table_console
from lockstep.comm import current_world, destroy_process_group, group_store, init_process_group
from lockstep.comm.hosts import why_alone
from lockstep.comm.link_check import LinkReport, check_links
from lockstep.comm.nccl_defects import explain_defects
from lockstep.devices import Gpu, Holder, Inventory, Placement, choose_devices, place_workers, take_inventory
from lockstep.devices.choose import find_unseen_bytes
from lockstep.devices.inventory import describe_bytes, describe_holder, gpu_number
from lockstep.errors import DeviceError, UsageError
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run

_DEFAULT_REQUESTS = ("auto", "auto:3")


def devices(
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="REQUEST", help="What to try: auto:2, auto:3@20GiB, 0,2 ... Default: auto auto:3"),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Check sums over every pair of devices of one REQUEST (default: auto).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --test: take GPUs that others use, too.")] = False,
    as_json: JSON = False,
) -> None:
    """Show the GPUs, the processes that use them, the CPU, and what `auto` would take right now.

    The exit code is 0, also where there is no GPU. With --test it is 1 if a sum was wrong or a call did not end.
    """
    if test:
        raise typer.Exit(_test(requests or ["auto"], force=force, as_json=as_json))
    inventory = take_inventory()
    answers = [(request, _try(request, inventory)) for request in requests or _DEFAULT_REQUESTS]
    if as_json:
        typer.echo(json.dumps(_as_document(inventory, answers), indent=2, default=_in_words))
    else:
        _show(inventory, answers)


def _test(requests: list[str], *, force: bool, as_json: bool) -> int:
    if len(requests) != 1:
        raise UsageError(f"--test takes one request, but {len(requests)} are given: {' '.join(requests)}. (LS821)")
    placement = place_workers(requests[0], force=force)
    if len(placement.devices) == 1:
        raise UsageError(f"--test needs two devices or more, but the request gets one: {placement.reason}. (LS821)")
    if not as_json:
        typer.echo(f"devices: {placement.reason}")
    links = check_placement(placement)
    if as_json:
        document = {
            "devices": [asdict(device) for device in placement.devices],
            "links": [asdict(each) for each in links],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        show_links(links, placement)
    return 0 if _are_right(links) else FAILURE_EXIT


def _try(request: str, inventory: Inventory) -> Placement | DeviceError:
    try:
        return choose_devices(request, inventory=inventory)
    except DeviceError as error:
        return error


def _as_document(inventory: Inventory, answers: Iterable[tuple[str, Placement | DeviceError]]) -> dict[str, Any]:
    tried: list[dict[str, Any]] = []
    for request, answer in answers:
        if isinstance(answer, DeviceError):
            tried.append({"request": request, "devices": [], "reason": None, "hint": None, "refused": str(answer)})
        else:
            tried.append({"request": request, **asdict(answer), "refused": None})
    return {**asdict(inventory), "why_no_shared_memory": why_alone(), "requests": tried}


def _in_words(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _show(inventory: Inventory, answers: Iterable[tuple[str, Placement | DeviceError]]) -> None:
    console = table_console()
    if inventory.gpus:
        console.print(_gpu_table(inventory))
    if inventory.problem:
        typer.echo(f"No GPU can be used: {inventory.problem}.")
    typer.echo(
        f"CPU: {inventory.num_cores} cores, {describe_bytes(inventory.memory_available_bytes)} of "
        f"{describe_bytes(inventory.memory_total_bytes)} free"
    )
    if reason := why_alone():
        typer.echo(f"Workers use Gloo, because they cannot share memory: {reason}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLinks:
    backend: str
    device: str
    reports: Sequence[LinkReport]
    warning: str = ""
    """What is known of this version of the backend; empty for nothing."""


def check_placement(placement: Placement) -> list[BackendLinks]:
    """Start a worker on each device and check their links, by the backends of training: theirs, shared memory, Gloo."""
    found: list[list[BackendLinks]] = launch(_check_worker, devices=placement)
    return found[0]


def show_links(links: Sequence[BackendLinks], placement: Placement) -> None:
    console = table_console()
    table = Table("backend", "between", "8 MiB in", "result")
    for backend, report in _rows(links):
        time = "" if report.problem else f"{report.seconds * 1000:.1f} ms"
        between = _name_ranks(report.ranks, placement)
        table.add_row(f"{backend.backend} ({backend.device})", Text(between), time, Text(report.problem or "right"))
    console.print(table)
    for warning in filter(None, (each.warning for each in links)):
        sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(f"{give_verdict(links, placement)}\n")


def give_verdict(links: Sequence[BackendLinks], placement: Placement) -> str:
    wrong = [(backend, report) for backend, report in _rows(links) if report.problem]
    if not wrong:
        return "Every sum was right."
    where = ", ".join(f"{backend.backend} between {_name_ranks(report.ranks, placement)}" for backend, report in wrong)
    advice = ""
    if any(backend.backend == "nccl" for backend, _ in wrong):
        advice = (
            " Try again with NCCL_P2P_DISABLE=1: if the sums are right then, the direct path between the GPUs is "
            "faulty (often PCI access control, ACS or IOMMU, in the BIOS), and training needs that variable, or that "
            "path repaired."
        )
    return f"These devices do not add up correctly: {where}. Do not train on them together.{advice}"


def _are_right(links: Sequence[BackendLinks]) -> bool:
    return not any(report.problem for _, report in _rows(links))


def _rows(links: Sequence[BackendLinks]) -> Iterator[tuple[BackendLinks, LinkReport]]:
    return ((backend, report) for backend in links for report in backend.reports)


def _name_ranks(ranks: Sequence[int], placement: Placement) -> str:
    """Return "GPU 0 (NVIDIA T4) - GPU 1 (NVIDIA T4)", or "worker 0 - worker 1" on the CPU."""
    if len(ranks) > 2:  # noqa: PLR2004 - more than a pair
        return f"all {len(ranks)}"
    devices = [placement.devices[rank] for rank in ranks]
    names = (device.label if device.visible else f"worker {rank}" for rank, device in zip(ranks, devices, strict=True))
    return " - ".join(names)


def _check_worker(run: Run) -> list[BackendLinks]:
    """Check the links of this worker with each backend, up to the first that is wrong (collective)."""
    found: list[BackendLinks] = []
    if run.device.type != "cpu":
        name, warning = dist.Backend.default_device_backend_map[run.device.type], ""
        if name == "nccl":
            major, minor, patch, *_ = torch.cuda.nccl.version()
            warning = explain_defects((major, minor, patch), world_size=run.world_size, is_one_host=True)
        found.append(_check_links(name, run.device, warning))
    # If a call has not ended, the worker is not usable any more.
    if _are_right(found) and not why_alone():
        found.append(_check_links("shm", torch.device("cpu")))
    if _are_right(found):
        group = current_world().group
        assert group is not None
        store = group_store(group)
        assert store is not None
        destroy_process_group()
        init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)
        found.append(_check_links("gloo", torch.device("cpu")))
    return found


def _check_links(backend: str, device: torch.device, warning: str = "") -> BackendLinks:
    reports = check_links(current_world(), device)
    return BackendLinks(backend=backend, device=device.type, reports=reports, warning=warning)


COMMAND = command(devices)
