"""What tells one process from another with the same number: when it started, and in which boot of the host."""

from pathlib import Path


def boot_id() -> str:
    """Return what identifies this boot of the host; empty where the system has none (local)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot; 0 if there is no such process (local)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])  # the name, in parentheses, may contain spaces
