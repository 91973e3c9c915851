"""What GPUs are here and where workers land, seen through NVML; skips itself without one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pynvml
import pytest
import torch

import lockstep as ls
from lockstep.devices import Gpu, take_inventory
from lockstep.devices.choose import find_occupants
from lockstep.errors import DeviceError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def whole_gpus() -> list[Gpu]:
    """Return the visible cards that nobody else computes on and MIG does not split."""
    inventory = take_inventory()
    return [
        gpu for gpu in inventory.gpus if gpu.is_visible and gpu.instance is None and not find_occupants(gpu, inventory)
    ]


@contextmanager
def nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def used_bytes() -> list[int]:
    """Return how much of each card is in use; a CUDA context takes a few hundred MiB."""
    with nvml():
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]


def look_from_within(run: ls.Run) -> tuple[str, str, int, list[int], list[int]]:
    """Compute, then say: device, its UUID, how many this worker sees, cards that it is on, what of each is in use."""
    tensor = torch.ones(1024, 1024, device="cuda")  # the current device
    torch.distributed.all_reduce(tensor)
    torch.ones(8).pin_memory()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    with nvml():
        mine = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
            mine += [index] if os.getpid() in {process.pid for process in processes} else []
    used = used_bytes()
    torch.distributed.barrier()
    uuid = f"GPU-{torch.cuda.get_device_properties(run.device).uuid}"
    return f"{tensor.device} {run.device}", uuid, torch.cuda.device_count(), mine, used


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_have_contexts_on_their_own_cards_alone(num_workers: int) -> None:
    free = whole_gpus()
    if len(free) < num_workers:
        pytest.skip(f"needs {num_workers} free GPUs")
    chosen = free[-num_workers:]  # not those that a mistake would take
    before = used_bytes()
    found = ls.launch(look_from_within, devices=[gpu.index for gpu in chosen])
    for gpu, (devices, uuid, num_seen, mine, used) in zip(chosen, found, strict=True):
        assert (devices, uuid, num_seen) == ("cuda:0 cuda:0", gpu.uuid, 1)
        assert mine in ([gpu.index], [])  # empty in a container, where NVML does not know our numbers
        others = set(range(len(before))) - {other.index for other in chosen}
        assert [index for index in others if used[index] > before[index] + 100 * 2**20] == []
        assert used[gpu.index] > before[gpu.index] + 100 * 2**20


def test_a_worker_on_the_cpu_sees_no_card() -> None:
    assert ls.launch(lambda _run: torch.cuda.device_count(), devices="cpu:2") == [0, 0]


def test_looking_finds_cards_and_makes_no_context() -> None:
    script = (
        "import torch; from lockstep.devices import *; print([gpu.name for gpu in take_inventory().gpus]); "
        "assert not torch.cuda.is_initialized()"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "NVIDIA" in printed
    assert "unknown" not in printed


def test_a_card_that_a_worker_holds_is_not_free() -> None:
    def hold(_run: ls.Run, index: int) -> str:
        free, _ = torch.cuda.mem_get_info()
        held = torch.empty(free // 2, dtype=torch.uint8, device="cuda")  # shows even where processes do not
        held[-1] = 1
        torch.cuda.synchronize()
        script = f"from lockstep.devices import *; choose_devices([{index}], inventory=take_inventory())"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr

    free = whole_gpus()
    if not free:
        pytest.skip("needs a free GPU")
    [told] = ls.launch(hold, free[0].index, devices=[free[0].index])
    assert "asks for GPUs that are not free" in told


def test_a_card_that_is_not_there_is_one_message() -> None:
    with pytest.raises(DeviceError, match="the only ones here are 0"):
        ls.launch(lambda _run: None, devices=[99])
