"""What a launcher records: when workers start, and how they end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.doctor.stall_watch import stalls_watched
from lockstep.recording import LAUNCHER, WorkerRecorder, open_recorder
from lockstep.settings import read_settings


@contextmanager
def launch_recorded(recording: Path | None, world_size: int) -> Iterator[WorkerRecorder]:
    """Record a launch within the block, unless `recording` is None, and log why its workers stand still if they do."""
    recorder, settings = WorkerRecorder(), read_settings().recording()
    if recording is not None:
        capacity = settings.capacity
        open_recorder(recorder, recording, worker=LAUNCHER, rank=LAUNCHER, world_size=world_size, capacity=capacity)
    try:
        with stalls_watched(recording, recorder):
            yield recorder
    finally:
        recorder.close()
        if recording is not None and not settings.is_kept:
            shutil.rmtree(recording, ignore_errors=True)
