"""Looking at machines that NVML, psutil and the environment describe: what is found, and what is not known."""

import os
import pwd
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from tests.unit.devices.machines import GIB, NO_FUNCTION, NOT_SUPPORTED, Card, FakeNvml, gpu, instance, machine, refusal

from lockstep.devices import Inventory, inventory, look, take_inventory
from lockstep.devices.choose import choose_devices, find_occupants
from lockstep.devices.inventory import count_cores, look_up_holder, measure_memory
from lockstep.devices.look import find_by_bytes, find_visible, measure_own_memory, needs_driver
from lockstep.errors import DeviceError
from lockstep.settings import Settings, VisibleDevices

NO_PERMISSION = refusal(pynvml.NVML_ERROR_NO_PERMISSION)
LOST = refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
GONE = 2**22 + 1  # above the kernel's largest pid


@pytest.fixture(autouse=True)
def _opened_gpu(tmp_path: Path) -> Iterator[None]:
    """Let this process have opened a GPU, as holders have: in a container only such a process is one."""
    with (tmp_path / "libcuda.so.1").open("w"):
        yield


def look_at(*cards: Card, variable: str | None = None, order: str | None = None, **options: Any) -> Inventory:
    nvml: Any = FakeNvml(*cards, **{name: options.pop(name) for name in ("broken", "is_old") if name in options})
    seen = VisibleDevices(devices=variable, order=order)
    torch_problem = options.get("torch_problem", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "pynvml", nvml)
        patch.setattr(Settings, "visible_devices", lambda _: seen)
        patch.setattr(look, "ask_driver", options.get("ask", lambda: pytest.fail("the driver was asked")))
        patch.setattr(look, "_find_torch_problem", lambda: torch_problem)
        patch.setattr(look, "measure_own_memory", options.get("measure_own", dict))
        inventory = take_inventory()
    assert nvml.num_open == 0, "NVML was not closed"
    return inventory


def card(number: int, **answers: Any) -> Card:
    return Card(uuid=f"GPU-{number}{number}000000-0000-0000-0000-000000000000", **answers)


TWO = card(0), card(1)


def shown(inventory: Inventory) -> list[int]:
    return [gpu.index for gpu in inventory.gpus if gpu.is_visible]


def test_a_card_is_described() -> None:
    inventory = look_at(Card(load=37, memory=(24 * GIB, 20 * GIB)))
    [gpu] = inventory.gpus
    assert (gpu.index, gpu.name, gpu.utilisation_percent) == (0, "NVIDIA GeForce RTX 3090", 37)
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (24 * GIB, 20 * GIB)
    assert gpu.uuid == gpu.cuda_name == Card().uuid
    assert (inventory.driver, inventory.problem, gpu.problem, gpu.is_visible) == ("560.35", "", "", True)
    assert inventory.num_cores >= 1
    assert 0 < inventory.memory_available_bytes <= inventory.memory_total_bytes


def test_holders_that_only_draw_are_marked() -> None:
    both, compute, desktop = os.getpid(), GONE, GONE + 1
    [gpu] = look_at(Card(computing={both: GIB, compute: None}, drawing={both: GIB, desktop: 5})).gpus
    found = {holder.pid: holder for holder in gpu.holders}
    assert [found[pid].is_graphics for pid in (both, compute, desktop)] == [False, False, True]
    assert [found[pid].memory_bytes for pid in (both, compute, desktop)] == [GIB, None, 5]
    assert [found[pid].is_self for pid in (both, compute, desktop)] == [True, False, False]


OWN = {"0a0a0a0a" + "0" * 24: 6 * GIB}


@pytest.mark.parametrize(
    ("computing", "expected"),
    [
        ({}, {os.getpid(): True}),  # the driver lists no process of another namespace
        ({GONE: 7 * GIB}, {GONE: True}),  # by its id in the host's namespace
        ({GONE: None}, {GONE: True}),
        ({GONE: GIB, GONE + 1: 7 * GIB}, {GONE: False, GONE + 1: True}),
        ({os.getpid(): 7 * GIB}, {os.getpid(): True}),
    ],
)
def test_the_memory_of_this_process_is_not_that_of_another(
    computing: dict[int, int | None], expected: dict[int, bool]
) -> None:
    # In a container the driver's process ids are the host's: a notebook's own model made its only card busy.
    [gpu] = look_at(Card(computing=computing, memory=(24 * GIB, 17 * GIB)), measure_own=lambda: OWN).gpus
    assert {holder.pid: holder.is_self for holder in gpu.holders} == expected
    is_free = find_occupants(gpu, machine(gpu)) == ""
    assert is_free == all(expected.values())


def test_a_card_that_this_process_does_not_use_is_held_by_others() -> None:
    [gpu] = look_at(Card(computing={GONE: GIB}), measure_own=lambda: {"bb" + "0" * 30: GIB}).gpus
    assert [holder.is_self for holder in gpu.holders] == [False]


def test_own_memory_is_measured_by_torch_if_it_has_used_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_own_memory() == {}
    uuid = "0A0A0A0A-0000-0000-0000-000000000000"  # as torch shows it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: index * 9 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: index * 6 * GIB)
    assert measure_own_memory() == OWN


def test_an_old_driver_lists_processes_by_its_own_function() -> None:
    [gpu] = look_at(Card(computing={GONE: 1}, drawing={GONE + 1: 1}), is_old=True).gpus
    assert {holder.pid for holder in gpu.holders} == {GONE, GONE + 1}


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, NO_FUNCTION])
def test_what_a_card_does_not_report_is_unknown(error: Exception) -> None:
    [gpu] = look_at(
        Card(uuid=error, name=error, memory=error, load=error, computing=error, drawing=error, compute_mode=error)
    ).gpus
    assert (gpu.uuid, gpu.cuda_name, gpu.name, gpu.holders, gpu.problem) == (None, "0", "unknown", (), "")
    assert gpu.memory_total_bytes is gpu.memory_free_bytes is gpu.utilisation_percent is None


@pytest.mark.parametrize("broken", [{"lost": LOST}, {"memory": LOST}, {"computing": LOST}])
def test_a_lost_card_keeps_its_place(broken: dict[str, Exception]) -> None:
    first, second = look_at(Card(**broken), card(1)).gpus
    assert (first.index, first.problem) == (0, "the driver reports 'GPU is lost'")
    assert (second.index, second.problem) == (1, "")
    [forbidden] = look_at(Card(compute_mode=pynvml.NVML_COMPUTEMODE_PROHIBITED)).gpus
    assert "compute mode is Prohibited" in forbidden.problem


def test_a_split_card_is_its_instances() -> None:
    parts = {0: Card(uuid="MIG-aa", load=NOT_SUPPORTED), 2: Card(uuid="MIG-bb", load=NOT_SUPPORTED)}
    found = look_at(Card(mig_mode=1, instances=parts), card(1)).gpus
    assert [(gpu.index, gpu.instance, gpu.cuda_name) for gpu in found[:2]] == [(0, 0, "MIG-aa"), (0, 2, "MIG-bb")]
    assert [gpu.index for gpu in look_at(Card(mig_mode=1), card(1)).gpus] == [1]  # split, with no instance made yet


@pytest.mark.parametrize(
    ("code", "said", "is_faulty"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed here", False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded here", False),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated but the old one still runs: reboot", True),
        (pynvml.NVML_ERROR_NO_PERMISSION, "rights of /dev/nvidia", True),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer: Unknown Error", True),
    ],
)
def test_no_nvml_is_one_line(code: int, said: str, is_faulty: bool) -> None:
    inventory = look_at(broken=refusal(code))
    assert inventory.gpus == ()
    assert said in inventory.problem
    assert inventory.is_faulty == is_faulty
    assert "\n" not in inventory.problem


def test_a_driver_without_cards_and_a_torch_without_cuda_are_problems() -> None:
    assert look_at().problem == "the NVIDIA driver sees no GPU"
    inventory = look_at(Card(), torch_problem="this torch is built without CUDA")
    assert (len(inventory.gpus), inventory.problem) == (1, "this torch is built without CUDA")


@pytest.mark.parametrize(("built", "is_too_old"), [("11.8", False), ("12.9", False), ("13.0", True), (None, False)])
def test_a_driver_that_is_too_old_for_torch_is_said_before_workers_start(built: str | None, is_too_old: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "_torch_build", lambda: {"__version__": "2.13.0+cu130", "cuda": built})
        inventory = look_at(Card())
    assert inventory.is_faulty == is_too_old
    for request in ("auto", "0") if is_too_old else ():
        with pytest.raises(DeviceError, match=r"driver runs CUDA up to 12\.6, .* CUDA 13\.0: .*cu126.*LS90[24]"):
            choose_devices(request, inventory=inventory)


@pytest.mark.parametrize(("variable", "names"), [(None, ["0", "1"]), ("3, 5", ["3", "5"])])
def test_cards_that_only_torch_sees_are_taken_from_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, names: list[str]
) -> None:
    # AMD's GPUs have no NVML; torch counts what the variable shows.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    inventory = look_at(broken=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), variable=variable)
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert [gpu.cuda_name for gpu in inventory.gpus] == names
    assert inventory.problem == ""


@pytest.mark.parametrize("has_driver", [False, True])
def test_torch_is_asked_for_cards_only_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    # The build that pip installs is for CUDA. Without a GPU, the launcher imported it and kept the script waiting.
    monkeypatch.setattr("lockstep.devices.look.is_driver_installed", lambda: has_driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    inventory = look_at(broken=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert len(inventory.gpus) == (2 if has_driver else 0)


@pytest.mark.parametrize(("kind", "variable"), [("xpu", "ZE_AFFINITY_MASK"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
@pytest.mark.parametrize(("shown_numbers", "names"), [(None, ["0", "1"]), ("2,5", ["2", "5"])])
def test_other_accelerators_are_found_and_given_one_per_worker(
    monkeypatch: pytest.MonkeyPatch, kind: str, variable: str, shown_numbers: str | None, names: list[str]
) -> None:
    # There were only GPUs of NVIDIA and AMD: the workers of a machine with others trained on its CPU.
    monkeypatch.setattr(torch.version, "xpu", "2025")
    for name, value in (
        ("is_available", True),
        ("current_accelerator", SimpleNamespace(type=kind)),
        ("device_count", 2),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.delenv(variable, raising=False)
    if shown_numbers is not None:
        monkeypatch.setenv(variable, shown_numbers)
    missing = refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    inventory = look_at(broken=missing, torch_problem="this torch is built without CUDA")
    placement = choose_devices("auto", inventory=inventory)
    assert [device.name for device in placement.devices] == [f"{kind}:0"] * 2
    assert [device.variables() for device in placement.devices] == [{variable: name} for name in names]
    assert placement.variables_of_all() == {variable: ",".join(names)}


def test_numbers_in_cudas_own_order_are_the_drivers_to_read() -> None:
    answer = frozenset({"11" + "0" * 30})
    assert shown(look_at(*TWO, variable="0", ask=lambda: answer)) == [1]
    assert shown(look_at(*TWO, variable="0", ask=lambda: None)) == [0], "without an answer they are nvidia-smi's"


def test_the_driver_is_not_asked_what_can_be_read() -> None:
    assert shown(look_at(*TWO)) == [0, 1]
    assert shown(look_at(*TWO, variable="GPU-11")) == [1]
    assert shown(look_at(*TWO, variable="1", order="PCI_BUS_ID")) == [1]
    assert shown(look_at(*TWO, variable="")) == []
    assert shown(look_at(card(0), variable="0")) == [0]


def test_a_process_of_this_machine_is_known() -> None:
    holder = look_up_holder(os.getpid(), memory_bytes=None, is_graphics=False)
    assert holder.user == pwd.getpwuid(os.getuid()).pw_name
    assert holder.command is not None
    assert "/" not in holder.command.split()[0]
    assert holder.since is not None
    assert 0 <= (datetime.now().astimezone() - holder.since).total_seconds() < 3600
    gone = look_up_holder(GONE, memory_bytes=7, is_graphics=False)
    assert (gone.pid, gone.user, gone.command, gone.since, gone.memory_bytes) == (GONE, None, None, None, 7)


def test_values_that_cannot_be_read_of_a_process_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> list[str]:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "cmdline", refuse)
    holder = look_up_holder(os.getpid(), memory_bytes=None, is_graphics=False)
    assert holder.user is not None
    assert holder.command is None


def test_a_command_cannot_draw_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["/usr/bin/python3", "-c", "print()\n\x1b[2Jboo"])
    holder = look_up_holder(os.getpid(), memory_bytes=None, is_graphics=False)
    assert holder.command == "python3 -c print() [2Jboo"


# -- CUDA_VISIBLE_DEVICES, read as CUDA reads it -----------------------------------------------------------------------


THREE = (gpu(0), gpu(1), gpu(2))
SPLIT = (instance(0, 0), instance(0, 1), gpu(1))


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("", []),
        ("-1", []),
        ("none", []),
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 2 , 0 ", [0, 2]),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("1,x,2", [1]),
        ("1st,2nd", [1, 2]),
        ("1,1", []),
        ("1,GPU-2a", [1]),
        ("GPU-2a,GPU-0a", [0, 2]),
        ("GPU-2a,GPU-9,GPU-0a", [2]),
        ("GPU-2a,1", [2]),
        ("GPU-2a,GPU-2a2a", []),
        ("GPU-", []),
    ],
)
def test_the_list_ends_where_cudas_does(variable: str, expected: list[int]) -> None:
    assert sorted(gpu.index for gpu in find_visible(variable, THREE)) == expected


def test_instances_are_shown_by_their_own_names() -> None:
    assert find_visible("MIG-01", SPLIT) == {SPLIT[1]}
    assert find_visible("0", SPLIT) == {SPLIT[0], SPLIT[1]}


@pytest.mark.parametrize(
    ("variable", "order", "gpus", "expected"),
    [
        ("1,0", None, THREE, True),
        ("1,0", "FASTEST_FIRST", THREE, True),
        ("1,0", "PCI_BUS_ID", THREE, False),
        ("0", None, THREE[:1], False),
        ("", None, THREE, False),
        ("GPU-0a", None, THREE, False),
        ("0", "PCI_BUS_ID", SPLIT, True),
        ("GPU-0", "PCI_BUS_ID", SPLIT, True),
        ("MIG-01", None, SPLIT, False),
    ],
)
def test_the_driver_is_needed_for_an_order_of_its_own(
    variable: str, order: str | None, gpus: tuple[object, ...], expected: bool
) -> None:
    assert needs_driver(variable, order, gpus) == expected


def test_the_drivers_bytes_are_the_digits_of_the_uuid() -> None:
    assert find_by_bytes({"1a1a1a1a000000000000000000000001", "ff"}, THREE) == {THREE[1]}
    assert find_by_bytes({"01000000" + "0" * 24}, SPLIT) == {SPLIT[1]}


def test_the_variables_are_read() -> None:
    found = Settings({"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).visible_devices()
    assert (found.devices, found.order) == ("", "PCI_BUS_ID")
    assert Settings({}).visible_devices().devices is None


# -- Cores and memory under control groups, which are files here -------------------------------------------------------


CORES = len(os.sched_getaffinity(0))
MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the mount point of control groups, in which this process is in the group outer/inner."""
    (tmp_path / "membership").write_text("12:cpu:/old\n0::/outer/inner\n")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    monkeypatch.setattr(inventory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(inventory, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def test_without_a_limit_cores_are_those_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_MEMBERSHIP", Path("nowhere"))
    assert count_cores() == CORES


@pytest.mark.parametrize(("limit", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", CORES)])
def test_a_limit_of_processor_time_is_a_limit_of_cores(groups: Path, limit: str, expected: int) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text(f"{limit}\n")
    assert count_cores() == expected


def test_the_groups_around_count_too(groups: Path) -> None:
    (groups / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    (groups / "outer" / "cpu.max").write_text("100000 100000\n")
    assert count_cores() == 1
    (groups.parent / "cpu.max").write_text("1 100000\n")  # outside the mount point
    (groups / "outer" / "cpu.max").unlink()
    assert count_cores() == CORES


def test_a_limit_of_memory_counts_where_it_is_lower(groups: Path) -> None:
    (groups / "outer" / "memory.max").write_text(f"{64 * MIB}\n")
    (groups / "outer" / "memory.current").write_text(f"{24 * MIB}\n")
    (groups / "outer" / "inner" / "memory.max").write_text("max\n")
    assert measure_memory() == (64 * MIB, 40 * MIB)
    (groups / "outer" / "memory.max").unlink()
    assert measure_memory()[0] == psutil.virtual_memory().total
