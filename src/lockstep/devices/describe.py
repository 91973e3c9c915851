"""Describing GPUs and their holders, with the same words in tables, reasons and errors. Pure."""

from lockstep.devices.inventory import Gpu, Holder, Inventory

_GIB = 2**30
_SHOWN_COMMAND = 60


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
    """Return "23.7 GiB", or "unknown"."""
    return "unknown" if count is None else f"{count / _GIB:.1f} GiB"


def _shorten(command: str) -> str:
    return command if len(command) <= _SHOWN_COMMAND else command[: _SHOWN_COMMAND - 3] + "..."
