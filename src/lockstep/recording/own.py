"""The recorder of this process.

[Note: one recorder per process] Groups are made by torch, which passes them what it knows, and a reducer may be used by
a script that never heard of a recording. So there is one recorder per process, which all of them get here, once, when
they are made. It keeps events in memory until a launcher, a worker or `init_process_group` opens it.
"""

import atexit
import os
import time
from pathlib import Path
from typing import Final

from lockstep.recording.files import make_private_recording, remove_if_over
from lockstep.recording.opening import open_recorder
from lockstep.recording.writing import WorkerRecorder
from lockstep.settings import read_settings

_OWN: Final = WorkerRecorder()


def own_recorder() -> WorkerRecorder:
    return _OWN


def ensure_own_recorder(rank: int, world_size: int) -> bool:
    """Record what this process does, if nothing else has begun to and the user allows it (local).

    The recording is where the launcher wants it, or in the private folder. Return whether it has begun in the latter.
    """
    if _OWN.is_open:
        return False
    settings = read_settings().recording()
    if not settings.is_wanted:
        return False
    try:
        directory = Path(settings.directory) if settings.directory else make_private_recording(_job_name())
    except OSError:
        return False
    is_open = open_recorder(_OWN, directory, worker=rank, rank=rank, world_size=world_size, capacity=settings.capacity)
    has_begun = is_open and not settings.directory
    if has_begun and not settings.is_kept:
        atexit.register(_remove, directory)
    return has_begun


def _remove(directory: Path) -> None:
    """Remove the recording if this is the last worker that writes to it."""
    if _OWN.directory == directory:  # else this is a forked child, or the recording was closed before
        _OWN.close()
        remove_if_over(directory)


def new_recording(wanted: Path | None) -> Path | None:
    """Return where a launcher's workers record; None if the user wants no recording, or there is no place (local).

    One that is not kept is in the private folder, whatever is wanted.
    """
    settings = read_settings().recording()
    if not settings.is_wanted:
        return None
    if wanted is not None and settings.is_kept:
        return wanted
    try:
        return make_private_recording(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    except OSError:
        return None


def _job_name() -> str:
    """Return a name that the workers of one job on this host have in common: they have one parent and one port."""
    variables = read_settings().launchers()
    if "MASTER_PORT" not in variables:
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return f"port{variables['MASTER_PORT']}-{os.getppid()}"


def _begin_under_launcher() -> None:
    """Record from the import of Lockstep on, if a launcher of ours wants it: the script may hang before its group."""
    settings = read_settings()
    variables = settings.launchers()
    rank, world_size = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
    if settings.recording().directory and rank.isdecimal() and world_size.isdecimal():
        ensure_own_recorder(int(rank), int(world_size))


os.register_at_fork(after_in_child=_OWN.forget)
_begin_under_launcher()
atexit.register(_OWN.close)
