"""Making the files of a recording, and the folders for jobs without a run directory."""

import mmap
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from lockstep.processes.host import start_ticks
from lockstep.recording.file_format import parse_header

_MODE: Final = 0o600
_NUM_KEPT: Final = 20
"""So many recordings of jobs without a run directory are kept."""


def make_file(path: Path, size: int) -> mmap.mmap:
    """Make a file of `size` bytes, all zero, and map it; `OSError` if it exists, or there is no space.

    Its blocks are allocated now: on a full disk, writing to a page of a file without blocks ends the process (SIGBUS).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def private_folder() -> Path:
    """Return the folder with the recordings of jobs without a run directory; made if it is not there.

    `OSError`: it cannot be made, or belongs to another user, who could read or replace what is written there.
    """
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone.")
    return folder


def make_private_recording(name: str) -> Path:
    """Return a folder for the recording of a job, and remove the oldest ones; several processes may call.

    The name ends in `-` and the process that started the job: while that runs, the recording is not removed.
    """
    folder = private_folder()
    recording = folder / name
    recording.mkdir(mode=0o700, exist_ok=True)
    others = sorted((each for each in folder.iterdir() if each != recording), key=_made_at, reverse=True)
    for old in others[_NUM_KEPT:]:
        starter = old.name.rpartition("-")[2]
        if not Path(f"/proc/{starter}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return recording


def remove_if_over(recording: Path) -> None:
    """Remove a recording if none of the processes that write to it runs (local)."""
    try:
        headers = [parse_header(path.read_bytes()) for path in recording.glob("*.rec")]
    except (OSError, ValueError):  # another process removes it, or begins to write
        return
    if all(each.ended_ns or start_ticks(each.pid) != each.start_ticks for each in headers):
        shutil.rmtree(recording, ignore_errors=True)


def _made_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
