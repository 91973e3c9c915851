"""What a machine has, as values: its GPUs and who uses them, its cores, its memory. `look.py` makes them."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has memory on a GPU."""

    pid: int
    """Its number, as the driver gives it."""
    user: str | None
    """Whose it is; None where this process may not know, as of a process in another container."""
    command: str | None
    """Its command line; None likewise."""
    since: datetime | None
    """When it started, in local time; None likewise."""
    memory_bytes: int | None
    """How much it holds; None where the driver does not say."""
    is_graphics: bool = False
    """Whether it only draws, as a desktop does."""
    is_self: bool = False
    """Whether it is this process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, or where one is split by MIG, one of its instances: what CUDA can give to a process."""

    index: int
    """Its number, or that of the GPU that it is an instance of, as nvidia-smi counts."""
    instance: int | None = None
    """Number of the MIG instance on its GPU; None for a whole GPU."""
    uuid: str | None
    """"GPU-..." or "MIG-...": means the same card in every process and after a reboot. None where it is not known."""
    cuda_name: str
    """What names it in CUDA_VISIBLE_DEVICES."""
    name: str
    """Of the model, such as "NVIDIA GeForce RTX 3090"."""
    memory_total_bytes: int | None
    """None where the driver does not say."""
    memory_free_bytes: int | None
    """Likewise."""
    utilisation_percent: int | None = None
    """Of its time in which it computed, just now. None where the driver does not say, as of MIG instances."""
    holders: tuple[Holder, ...] = ()
    """Who has memory on it, as far as can be seen from here."""
    is_visible: bool = True
    """Whether CUDA_VISIBLE_DEVICES leaves it to this process."""
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
    """One line on why this process can use no GPU at all; empty if nothing stands against it."""
    is_faulty: bool = False
    """Whether that is a fault to be mended, and not just what this machine is like."""
    driver: str | None
    """Version of the NVIDIA driver."""
    cuda_visible_devices: str | None
    """The variable, if it is set."""
    num_cores: int
    """Cores that this process may use."""
    memory_total_bytes: int
    """Main memory that this process may use."""
    memory_available_bytes: int
    """What is left of that."""
