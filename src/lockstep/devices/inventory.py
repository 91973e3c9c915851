"""What a machine has, as values: its GPUs and the processes on them, its cores, its memory. `look.py` makes them.

Here are also the parts that read cores, memory and processes from the system, and the words for GPUs and holders.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from lockstep.processes.host import read_control_groups

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_GIB = 2**30
_SHOWN_COMMAND = 60
_HOST_NAMESPACE = 0xEFFFFFFC
"""The inode of the first namespace of process ids, in every kernel (PROC_PID_INIT_INO)."""
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")
_GPU_LIBRARY = "/libcuda.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has memory on a GPU. None: it cannot be seen, as of another container, or is not reported."""

    pid: int
    """Its process id, as the driver reports it."""
    user: str | None
    command: str | None
    since: datetime | None
    """When it started, in local time."""
    memory_bytes: int | None
    is_graphics: bool = False
    """Whether it only draws, as a desktop does."""
    is_self: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that CUDA can give to a process; with MIG, each instance of one. None: not known, or not reported."""

    index: int
    """The number that nvidia-smi shows; for a MIG instance that of its GPU."""
    instance: int | None = None
    """Number of the MIG instance on its GPU; None for a whole GPU."""
    uuid: str | None
    """"GPU-..." or "MIG-...": the same card in every process and after a reboot."""
    cuda_name: str
    """Its name for CUDA_VISIBLE_DEVICES, or for the variable of its kind."""
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    utilisation_percent: int | None = None
    """Share of the last moments in which it computed; None also for MIG instances."""
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
    taken_at: datetime
    gpus: tuple[Gpu, ...]
    """In nvidia-smi's order, those hidden by CUDA_VISIBLE_DEVICES included."""
    problem: str
    """One line on why this process can use no GPU at all; empty if it can."""
    is_faulty: bool = False
    """Whether the problem is a fault that can be repaired, and not simply a machine without GPUs."""
    driver: str | None
    cuda_visible_devices: str | None
    num_cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    is_wsl: bool = False
    """Whether this is Linux under Windows (WSL), where the processes of Windows' desktop cannot be seen."""
    nccl_version: tuple[int, ...] = ()
    """Version of NCCL that torch uses; empty where it is not known."""


def count_cores() -> int:
    """Return how many cores this process may use, within its affinity and its control groups; 1 or more."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = psutil.cpu_count() or 1
    for folder in _own_groups():
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            cores = min(cores, max(quota // period, 1))
    return cores


def measure_memory() -> tuple[int, int]:
    """Return how much main memory this process may use, and how much of that is left, in bytes."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _own_groups():
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _own_groups() -> Iterator[Path]:
    """Yield the folders of this process' control group and of its parents, in version 2 of control groups.

    They limit a container or a cluster's job. What the kernel reports for the machine does not include these limits.
    """
    own = read_control_groups(_MEMBERSHIP).get("")
    if own is not None:
        folder = _GROUPS / own
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(_GROUPS)))


def short_label(gpu: Gpu) -> str:
    """Return "GPU 2", or "GPU 0:1" for instance 1 of GPU 0."""
    return f"GPU {gpu_number(gpu)}"


def label(gpu: Gpu) -> str:
    """Return "GPU 2 (NVIDIA GeForce RTX 3090)"."""
    return f"{short_label(gpu)} ({gpu.name})"


def gpu_number(gpu: Gpu) -> str:
    """Return the number by which a request may name the GPU."""
    return str(gpu.index) if gpu.instance is None else f"{gpu.index}:{gpu.instance}"


def describe_holder(holder: Holder, inventory: Inventory) -> str:
    """Return who holds a GPU: "alice, pid 123, python train.py, since 10:32"; with the date if that is another day."""
    if holder.user is None and holder.command is None:
        return f"pid {holder.pid}, whose user and command cannot be seen from here"
    parts = [holder.user or "an unknown user", f"pid {holder.pid}"]
    if holder.command is not None:
        parts.append(_shorten(holder.command))
    if holder.since is not None:
        is_today = holder.since.date() == inventory.taken_at.date()
        parts.append(f"since {holder.since:%H:%M}" if is_today else f"since {holder.since:%Y-%m-%d %H:%M}")
    return ", ".join(parts)


def describe_bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / _GIB:.1f} GiB"


def _shorten(command: str) -> str:
    return command if len(command) <= _SHOWN_COMMAND else command[: _SHOWN_COMMAND - 3] + "..."


def _has_ids_of_host(own: frozenset[int]) -> bool:
    """Return whether the ids in /proc are the host's; `own` are those of this process.

    [Note: pids of the driver] The driver reports process ids of the host. In a container, newer drivers translate them
    into the container's ids, older ones do not. Such an id may then belong to no process in the container, or to one
    that has nothing to do with GPUs. So in a namespace other than the host's, an id is taken for that of a process only
    if the process has opened a GPU.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - of the namespace, not of the link
    except OSError:  # not Linux
        return True
    # Where /proc is the host's, but not the namespace, this process has several ids in it.
    return namespace == _HOST_NAMESPACE or len(own) > 1


def look_up_holder(pid: int, *, memory_bytes: int | None, is_graphics: bool) -> Holder:
    """Return a process that has memory on a GPU, with its user, command and start if these can be seen.

    The driver's pid may belong to a process outside this container, or to one that has ended. Then the fields are None,
    which is not an error.
    """
    own = _read_own_ids()
    user, command, since = None, None, None
    is_here = _has_ids_of_host(own) or _uses_gpu(pid)
    if is_here:
        try:
            process = psutil.Process(pid)
            since = datetime.fromtimestamp(process.create_time()).astimezone()
            user = process.username()
            command = _clean(process.cmdline() or [process.name()])
        except (psutil.Error, OSError, ValueError):  # values that were read before this error are kept
            pass
    return Holder(
        pid=pid,
        user=user,
        command=command,
        since=since,
        memory_bytes=memory_bytes,
        is_graphics=is_graphics,
        is_self=is_here and pid in own,
    )


def _read_own_ids() -> frozenset[int]:
    """Return the ids of this process: /proc may be that of an outer namespace, in which it has another one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return frozenset({os.getpid(), *map(int, line.split()[1:])})
    return frozenset({os.getpid()})


def _uses_gpu(pid: int) -> bool:
    """Return whether a process has opened a GPU; False too where that cannot be seen, as of another user's."""
    with contextlib.suppress(OSError):
        return any(path.startswith(_GPU_FILES) or _GPU_LIBRARY in path for path in _open_files(pid))
    return False


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(descriptor.path)  # noqa: PTH115 - pathlib is slow
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        yield from (line.rpartition(" ")[2].strip() for line in maps)


def _clean(words: list[str]) -> str:
    """Return a command on one line, the program without its folder, without control characters for the terminal."""
    line = " ".join([os.path.basename(words[0]) or words[0], *words[1:]])  # noqa: PTH119 - a name, not a path of ours
    return " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())
