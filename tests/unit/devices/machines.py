"""Machines that are not here: inventories by hand, and a fake NVML with the answers that its manual describes."""

# ruff: noqa: N802 - the names are NVML's

from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pynvml

from lockstep.devices import Gpu, Holder, Inventory

GIB = 2**30
NOW = datetime(2026, 3, 9, 14, 0, tzinfo=UTC)
ALICE = Holder(
    pid=123, user="alice", command="python train.py", since=NOW.replace(hour=10, minute=32), memory_bytes=9 * GIB
)


def gpu(index: int, *, free: float = 23.5, total: float = 24, **fields: Any) -> Gpu:
    """Return a GPU that nobody uses, but for `fields`; memory in GiB."""
    uuid = f"GPU-{index}a{index}a{index}a{index}a-0000-0000-0000-00000000000{index}"
    usual: dict[str, Any] = {
        "uuid": uuid,
        "cuda_name": fields.get("uuid", uuid),
        "name": "NVIDIA GeForce RTX 3090",
        "memory_total_bytes": int(total * GIB),
        "memory_free_bytes": int(free * GIB),
    }
    return Gpu(index=index, **{**usual, **fields})


def held(index: int, *holders: Holder, free: float = 14.5) -> Gpu:
    return gpu(index, free=free, holders=holders or (ALICE,))


def instance(index: int, number: int) -> Gpu:
    uuid = f"MIG-{index}{number}000000-0000-0000-0000-000000000000"
    return gpu(index, instance=number, uuid=uuid, name="NVIDIA A100 MIG 3g.20gb", total=20, free=19.9)


def machine(*gpus: Gpu, **fields: Any) -> Inventory:
    usual: dict[str, Any] = {
        "taken_at": NOW,
        "problem": "" if gpus else "no NVIDIA driver is installed here",
        "driver": "560.35",
        "cuda_visible_devices": None,
        "num_cores": 8,
        "memory_total_bytes": 64 * GIB,
        "memory_available_bytes": 60 * GIB,
    }
    return Inventory(gpus=gpus, **{**usual, **fields})


def refusal(code: int) -> Exception:
    """Return NVML's error of that code."""
    error: Exception = pynvml.NVMLError(code)
    return error


NOT_SUPPORTED = refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
NO_FUNCTION = refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


@dataclass
class Card:
    """What NVML answers of one GPU; an exception is raised instead."""

    uuid: Any = "GPU-0a0a0a0a-0000-0000-0000-000000000000"
    name: Any = "NVIDIA GeForce RTX 3090"
    memory: Any = (24 * GIB, 23 * GIB)
    load: Any = 0
    computing: Any = field(default_factory=dict)
    drawing: Any = field(default_factory=dict)
    mig_mode: Any = field(default_factory=lambda: NOT_SUPPORTED)
    instances: dict[int, "Card"] = field(default_factory=dict)
    compute_mode: Any = pynvml.NVML_COMPUTEMODE_DEFAULT
    lost: Any = None


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def processes(value: Any) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in answer(value).items()]


class FakeNvml:
    """The functions of pynvml that are used, over cards; constants and errors are the real module's."""

    def __init__(self, *cards: Card, broken: Exception | None = None, is_old: bool = False) -> None:
        self.cards = cards
        self.broken = broken
        self.is_old = is_old
        self.num_open = 0

    def __getattr__(self, name: str) -> Any:
        # A function that the fake lacks must not reach a real driver.
        assert not name.startswith("nvml"), f"the fake has no {name}"
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        answer(self.broken)
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "560.35"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12060

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        answer(self.cards[index].lost)
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> Any:
        return answer(card.uuid)

    def nvmlDeviceGetName(self, card: Card) -> Any:
        return answer(card.name)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        total, free = answer(card.memory)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        return SimpleNamespace(gpu=answer(card.load), memory=0)

    def nvmlDeviceGetComputeMode(self, card: Card) -> Any:
        return answer(card.compute_mode)

    def nvmlDeviceGetMigMode(self, card: Card) -> Any:
        return [answer(card.mig_mode), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, number: int) -> Card:
        if number not in card.instances:
            raise refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return card.instances[number]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: Card) -> Any:
        return processes(NO_FUNCTION if self.is_old else card.computing)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, card: Card) -> Any:
        return processes(card.computing)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, card: Card) -> Any:
        return processes(NO_FUNCTION if self.is_old else card.drawing)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, card: Card) -> Any:
        return processes(card.drawing)
