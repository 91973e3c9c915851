"""Opening a recorder: the header of this process, and a file of its own in the recording."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Final

from lockstep.processes.host import boot_id, start_ticks
from lockstep.recording.file_format import VERSION, FileHeader
from lockstep.recording.stacks import write_stacks_on_signal
from lockstep.recording.writing import WorkerRecorder

LAUNCHER: Final = -1
"""The number of the launcher in place of a worker's."""
_NUM_FILES: Final = 8
"""So many files of one worker are kept, where a run is resumed again and again."""


def open_recorder(
    recorder: WorkerRecorder,
    directory: Path,
    *,
    worker: int,
    rank: int,
    world_size: int,
    capacity: int,
) -> bool:
    """Let a recorder write to a new file of a recording; return whether that is possible (local).

    A recording is no reason to end a training: where a file cannot be made, nothing is recorded. `worker` is `LAUNCHER`
    for the launcher; `capacity` is a power of two.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _free_path(directory, "launcher" if worker == LAUNCHER else f"worker-{worker}")
        header = FileHeader(
            version=VERSION,
            capacity=capacity,
            pid=os.getpid(),
            stack_signal=0 if worker == LAUNCHER else write_stacks_on_signal(path.with_suffix(".stacks")),
            start_ticks=start_ticks(os.getpid()),
            worker=worker,
            opened_wall_ns=time.time_ns(),
            opened_ns=time.monotonic_ns(),
            host=socket.gethostname(),
            program=Path(sys.argv[0]).name if sys.argv else "",
            boot=boot_id(),
            rank=rank,
            world_size=world_size,
            generation=0,
            ended_ns=0,
            exit_code=-1,
        )
        recorder.open(path, header)
    except OSError:
        return False
    return True


def _free_path(directory: Path, name: str) -> Path:
    """Return the path of a new file; a worker that is started again, or resumed, leaves the file of the one before."""
    paths = [directory / f"{name}.rec", *(directory / f"{name}.{number}.rec" for number in range(2, _NUM_FILES + 1))]
    for path in paths:
        if not path.exists():
            return path
    oldest = min(paths, key=lambda each: each.stat().st_mtime)
    oldest.unlink()
    return oldest
