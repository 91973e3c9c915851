"""`lockstep devices --test`: whether the devices add up correctly together, over every pair and over all."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.comm import current_world, destroy_process_group, init_process_group
from lockstep.comm.link_check import LinkReport, check_links
from lockstep.comm.nccl_defects import explain_defects
from lockstep.comm.world import group_store
from lockstep.devices import Placement
from lockstep.launch.launcher import launch
from lockstep.launch.messages import Run

_CPU = torch.device("cpu")
_WIDTH_IN_FILES = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLinks:
    backend: str
    """"nccl", "gloo" or "shm"."""
    device: str
    reports: Sequence[LinkReport]
    """For each pair, and for all; fewer if a call did not end."""
    warning: str = ""
    """What is known of this version of the backend; empty for nothing."""


def check_placement(placement: Placement) -> list[BackendLinks]:
    """Start a worker on each device and check their links, by the backends of training: theirs, shared memory, Gloo."""
    found: list[list[BackendLinks]] = launch(_check_worker, devices=placement)
    return found[0]


def show_links(links: Sequence[BackendLinks], placement: Placement) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_IN_FILES
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
    """Return in a sentence or two whether every sum was right, and what to do if not."""
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


def are_right(links: Sequence[BackendLinks]) -> bool:
    return not any(report.problem for _, report in _rows(links))


def as_document(links: Sequence[BackendLinks]) -> list[dict[str, Any]]:
    return [asdict(each) for each in links]


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
        name = dist.Backend.default_device_backend_map[run.device.type]
        warning = _warn_of_nccl(run.world_size) if name == "nccl" else ""
        found.append(_check_links(name, run.device, warning))
    # If a call has not ended, the worker is not usable any more.
    if are_right(found):
        found.append(_check_links("shm", _CPU))
    if are_right(found):
        _make_gloo_group(run)
        found.append(_check_links("gloo", _CPU))
    return found


def _check_links(backend: str, device: torch.device, warning: str = "") -> BackendLinks:
    reports = check_links(current_world(), device)
    return BackendLinks(backend=backend, device=device.type, reports=reports, warning=warning)


def _make_gloo_group(run: Run) -> None:
    """Make a group over Gloo in place of the one that the worker has (collective)."""
    group = current_world().group
    assert group is not None
    store = group_store(group)
    assert store is not None
    destroy_process_group()
    init_process_group("gloo", store=store, rank=run.rank, world_size=run.world_size)


def _warn_of_nccl(world_size: int) -> str:
    major, minor, patch, *_ = torch.cuda.nccl.version()
    return explain_defects((major, minor, patch), world_size=world_size, is_one_host=True)
