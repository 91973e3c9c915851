"""Finding the user and the command of a process that uses a GPU, as far as this process may see them.

[Note: pids of the driver] The driver reports process ids of the host. In a container, newer drivers translate
them into the container's ids, older ones do not. Such an id may then belong to no process in the container, or to one
that has nothing to do with GPUs. So in a namespace other than the host's, an id is taken for that of a process only if
the process has opened a GPU.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from lockstep.devices.inventory import Holder

_HOST_NAMESPACE = 0xEFFFFFFC
"""The inode of the first namespace of process ids, in every kernel (PROC_PID_INIT_INO)."""
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")
_GPU_LIBRARY = "/libcuda.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIds:
    """How ids that the driver reports are read. [Note: pids of the driver]."""

    own: frozenset[int]
    """The ids of this process, in every namespace that can be seen from here."""
    are_of_host: bool
    """Whether the ids in /proc are the host's."""


def read_process_ids() -> ProcessIds:
    own = _read_own_ids()
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - of the namespace, not of the link
    except OSError:  # not Linux
        return ProcessIds(own=own, are_of_host=True)
    # Where /proc is the host's, but not the namespace, this process has several ids in it.
    return ProcessIds(own=own, are_of_host=namespace == _HOST_NAMESPACE or len(own) > 1)


def look_up_holder(
    pid: int, *, memory_bytes: int | None, is_graphics: bool, process_ids: ProcessIds | None = None
) -> Holder:
    """Return a process that has memory on a GPU, with its user, command and start if these can be seen.

    The driver's pid may belong to a process outside this container, or to one that has ended. Then the fields are None,
    which is not an error.
    """
    ids = read_process_ids() if process_ids is None else process_ids
    user, command, since = None, None, None
    is_here = ids.are_of_host or _uses_gpu(pid)
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
        is_self=is_here and pid in ids.own,
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
