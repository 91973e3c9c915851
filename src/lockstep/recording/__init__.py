"""One recording of what each worker does: events in a ring, in a mapped file that outlives the process.

    worker 0   worker-0.rec   header | texts | ring of events      written by `WorkerRecorder`, without a system call
    worker 1   worker-1.rec   ...
    launcher   launcher.rec   starts, losses, joins, ends of workers

An *event* has a kind, a begin and an end on the monotonic clock, the step, a number (shard, bucket, rank, ...), a size
in bytes and a text. An event without an end is under way. A *recording* is the folder with the files of one job.

Invariants:

- The kernel holds the pages, so a file is whole after `kill -9`. An event that was being written is recognised.
- The size is fixed. New events replace the oldest.
- No environment, no argument and no message of an exception is written.
- A process has one recorder, `own_recorder()`, which keeps events in memory until it is opened.
"""

from lockstep.recording.file_format import EventKind
from lockstep.recording.writing import (
    LAUNCHER,
    NO_EVENT,
    NULL_WORKER_RECORDER,
    WorkerRecorder,
    ensure_own_recorder,
    new_recording,
    open_recorder,
    own_recorder,
)

__all__ = [
    "LAUNCHER",
    "NO_EVENT",
    "NULL_WORKER_RECORDER",
    "EventKind",
    "WorkerRecorder",
    "ensure_own_recorder",
    "new_recording",
    "open_recorder",
    "own_recorder",
]
