"""Headers for files that tests write."""

import os

from lockstep.processes.host import boot_id, start_ticks
from lockstep.recording.file_format import FileHeader


def header(*, rank: int = 0, capacity: int = 16, boot: str = "", opened_ns: int = 0) -> FileHeader:
    return FileHeader(
        capacity=capacity,
        pid=os.getpid(),
        stack_signal=0,
        start_ticks=start_ticks(os.getpid()),
        worker=rank,
        opened_wall_ns=opened_ns,
        opened_ns=opened_ns,
        host="här",
        program="train.py",
        boot=boot or boot_id(),
        rank=rank,
        world_size=2,
    )
