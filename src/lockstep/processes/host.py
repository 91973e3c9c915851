"""A process on its host: stacks of its threads, what identifies it, loopback, freed memory, temporary files."""

import ctypes
import errno
import faulthandler
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

_THREAD: Final = re.compile(rb"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.MULTILINE)
_LINE: Final = re.compile(rb'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
NO_LOOPBACK = (
    "The loopback interface of this network namespace is down, or has no address of IPv4, so processes here cannot "
    "connect to 127.0.0.1. Run `ip link set lo up`, or `ip address add 127.0.0.1/8 dev lo`, in it, or start the "
    "container with a network."
)
_CREDENTIALS = struct.Struct("3i")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
_LARGEST_BLOCK_OF_OLD = 1 << 25
FREED_MEMORY_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": str(_LARGEST_BLOCK_OF_OLD), "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES)}
)
"""What has a program keep freed memory that is started with these variables, with any glibc."""


@dataclass(frozen=True, slots=True)
class StackLine:
    file: str
    """The file, as its code was compiled."""
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def stack_of_thread(thread_id: int | None) -> list[StackLine]:
    """Return what the thread with this `Thread.ident` runs, innermost line first, at most 100 lines; empty for none.

    Of more than 100 threads only the newest are seen, and so not the main one: then the answer is empty, too.

    [Note: another thread's frames] `sys._current_frames` gives the frames of threads that run on while they are looked
    at. From one frame to its caller the interpreter may change threads, and the frame may have been left meanwhile:
    then `f_back` returns whatever lies in its place by now, or the process dies. (Seen with Python 3.11, where it was
    the value that a generator had yielded.) `faulthandler` writes the stacks without giving another thread a turn.
    """
    with (
        tempfile.TemporaryFile()
        if not hasattr(os, "memfd_create")
        else os.fdopen(os.memfd_create("stacks"), "w+b") as file
    ):
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        written = file.read()
    for found in _THREAD.finditer(written):
        if int(found[1], 16) == thread_id:
            return [
                StackLine(name.decode(errors="replace"), int(number), function.decode(errors="replace"))
                for name, number, function in _LINE.findall(found[2])
            ]
    return []


def boot_id() -> str:
    """Return what identifies this boot of the host; empty where the system has none (local)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot; 0 if there is no such process (local)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(text.rpartition(b")")[2].split()[19])  # the name, in parentheses, may contain spaces


def open_process(pid: int, started: int = 0) -> int:
    """Return a descriptor that can be read when a process has ended, and that never comes to mean another one.

    `OSError` where there is no such process, or not the one that started at `started` (`start_ticks`), or where this
    system has no such descriptors.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.pidfd_open(pid)
    if started and start_ticks(pid) != started:
        os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return descriptor


def exit_code_of_child(pid: int, otherwise: Callable[[], int | None]) -> int | None:
    """Return how a child has ended, -N for signal N, without freeing its process id; None while it runs.

    `otherwise` is asked where the kernel does not tell: the child was waited for already, or is one of a fork server.
    """
    if sys.platform == "darwin":  # Python 3.11 has no waitid there
        return otherwise()
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return otherwise()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def read_control_groups(membership: Path) -> dict[str, str]:
    """Return the control groups in a file such as `/proc/self/cgroup`, by controllers; "" is that of version 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return {}
    return {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end of a Unix socket; see unix(7), SO_PEERCRED (Linux)."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


def has_loopback_address() -> bool:
    """Return whether this host has the address 127.0.0.1; one with IPv6 alone may not (local)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True


def has_loopback() -> bool:
    """Return whether there is a route to 127.0.0.1: a new network namespace has none (local; nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True


def keep_freed_memory() -> None:
    """Let malloc keep blocks of up to 1 GiB when they are freed, or of 32 MiB; without glibc does nothing (local).

    By default malloc returns large blocks to the system, and each step gets them again, page by page. That costs a
    quarter of a microsecond or more for every 4 KiB of activations and gradients. The threshold for the end of the heap
    alone makes it worse: glibc does not adapt the other one then, and gets each block of 128 KiB or more by itself.
    Before 2.35 glibc refuses blocks of more than 32 MiB. See mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None and (
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_OF_OLD)
    ):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_temporary_files_in(folder: str) -> None:
    """Let `multiprocessing` use this folder, here and in processes that this one starts; nothing if empty (local).

    A data-loading process sends tensors over a socket in a folder of its own, `/tmp/pymp-...`. It deletes that when it
    ends, but not when it is killed, as with its worker. So the launcher makes one folder for all, and has it deleted at
    the end.
    """
    if folder:
        from multiprocessing import process  # deferred: launchers need this module, and not that one

        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]  # noqa: SLF001
