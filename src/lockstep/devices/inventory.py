"""What a machine has, as values: its GPUs and the processes on them, its cores, its memory. `look.py` makes them."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has memory on a GPU."""

    pid: int
    """Its process id, as the driver reports it."""
    user: str | None
    """The user who runs it; None where that cannot be seen, as of a process in another container."""
    command: str | None
    """Its command line; None where that cannot be seen."""
    since: datetime | None
    """When it started, in local time; None where that cannot be seen."""
    memory_bytes: int | None
    """How much it has; None where the driver does not report it."""
    is_graphics: bool = False
    """Whether it only draws, as a desktop does."""
    is_self: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that CUDA can give to a process. Where MIG splits a GPU, each of its instances is one."""

    index: int
    """The number that nvidia-smi shows; for a MIG instance that of its GPU."""
    instance: int | None = None
    """Number of the MIG instance on its GPU; None for a whole GPU."""
    uuid: str | None
    """"GPU-..." or "MIG-...": the same card in every process and after a reboot. None where it is not known."""
    cuda_name: str
    """Its name for CUDA_VISIBLE_DEVICES, or for the variable of its kind."""
    name: str
    """Name of the model, such as "NVIDIA GeForce RTX 3090"."""
    memory_total_bytes: int | None
    """Its memory; None where the driver does not report it."""
    memory_free_bytes: int | None
    """Its free memory; None where the driver does not report it."""
    utilisation_percent: int | None = None
    """Share of the last moments in which it computed. None where the driver does not report it, as of MIG instances."""
    holders: tuple[Holder, ...] = ()
    """The processes that have memory on it, as far as they can be seen from here."""
    kind: str = "cuda"
    """Its type for torch: "cuda", also for AMD's, "xpu" or "npu"."""
    is_visible: bool = True
    """Whether CUDA_VISIBLE_DEVICES shows it to this process."""
    problem: str = ""
    """Why CUDA cannot use it, for example because it was lost; empty if CUDA can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A machine at one moment."""

    taken_at: datetime
    """When, in local time."""
    gpus: tuple[Gpu, ...]
    """In nvidia-smi's order, those hidden by CUDA_VISIBLE_DEVICES included."""
    problem: str
    """One line on why this process can use no GPU at all; empty if it can."""
    is_faulty: bool = False
    """Whether the problem is a fault that can be repaired, and not simply a machine without GPUs."""
    driver: str | None
    """Version of the NVIDIA driver."""
    cuda_visible_devices: str | None
    num_cores: int
    """Cores that this process may use."""
    memory_total_bytes: int
    """Main memory that this process may use."""
    memory_available_bytes: int
    """How much of it is free."""
    is_wsl: bool = False
    """Whether this is Linux under Windows (WSL), where the processes of Windows' desktop cannot be seen."""
    nccl_version: tuple[int, ...] = ()
    """Version of NCCL that torch uses; empty where it is not known."""
