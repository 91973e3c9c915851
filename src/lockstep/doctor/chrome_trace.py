"""The timeline of a recording in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process per worker, and in it a row per kind of event. Times are in microseconds since the first event.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lockstep.doctor.activity import PHASE_NAMES
from lockstep.recording.file_format import GROUP_SHIFT, EventKind
from lockstep.recording.reading import FileEvents, OneEvent, clock_offsets

_ROWS: Final = {
    "step": (EventKind.PHASE, EventKind.STARTED, EventKind.ENDED, EventKind.GENERATION),
    "loading": (EventKind.LOADING,),
    "shards": (EventKind.SHARD, EventKind.FORWARD, EventKind.BACKWARD),
    "reducing": (EventKind.REDUCING,),
    "evaluation": (EventKind.EVALUATING,),
    "saving": (EventKind.SAVING,),
    "calls": (EventKind.COLLECTIVE,),
    "waiting": (EventKind.WAITING, EventKind.LINE),
    "workers": (EventKind.WORKER_STARTED, EventKind.WORKER_ENDED),
}
_ROW_OF: Final[dict[int, str]] = {kind: row for row, kinds in _ROWS.items() for kind in kinds}
_NUM_BUCKET_ROWS: Final = 4
"""Buckets overlap: they are shown in so many rows."""


def chrome_trace(files: Sequence[FileEvents]) -> str:
    offsets = clock_offsets(files)
    begins = [
        int(file.table["begin"].min()) - offset for file, offset in zip(files, offsets, strict=True) if len(file.table)
    ]
    start = min(begins, default=0)
    events: list[dict[str, Any]] = []
    for number, (file, offset) in enumerate(zip(files, offsets, strict=True)):
        events += _worker_events(file, number, start + offset)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _worker_events(file: FileEvents, number: int, start: int) -> Iterator[dict[str, Any]]:
    rank = file.header.rank
    name = "launcher" if file.is_launchers else f"rank {rank}"
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{name} (process {file.header.pid})"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": rank % (1 << 30)}}
    rows: dict[str, int] = {}
    events = file.events()
    last = max((max(each.begin, each.end) for each in events), default=0)
    for event, end in _with_ends(events, last):
        row = _row(event)
        if row not in rows:
            rows[row] = len(rows)
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": rows[row], "args": {"name": row}}
        yield {
            "ph": "X",
            "name": _name(event),
            "cat": row,
            "pid": number,
            "tid": rows[row],
            "ts": (event.begin - start) / 1000,
            "dur": max(end - event.begin, 0) / 1000,
            "args": {"step": event.step, "index": event.index, "size": event.size, "text": event.text},
        }


def _with_ends(events: Sequence[OneEvent], last: int) -> Iterator[tuple[OneEvent, int]]:
    """Yield events with their ends: a phase ends with the next one, and what is under way with the last event."""
    phases = [each for each in events if each.kind == EventKind.PHASE]
    next_phase = {each.number: after.begin for each, after in itertools.pairwise(phases)}
    for event in events:
        if event.kind == EventKind.PHASE:
            yield event, next_phase.get(event.number, last)
        else:
            yield event, event.end or last


def _row(event: OneEvent) -> str:
    if event.kind == EventKind.BUCKET:
        return f"buckets {event.index % _NUM_BUCKET_ROWS}"
    return _ROW_OF.get(event.kind, "other")


def _name(event: OneEvent) -> str:
    match event.kind:
        case EventKind.PHASE:
            return PHASE_NAMES.get(event.index, f"phase {event.index}")
        case EventKind.SHARD | EventKind.BUCKET:
            return f"{EventKind(event.kind).name.lower()} {event.index}"
        case EventKind.COLLECTIVE:
            return event.text or f"call {event.index & ((1 << GROUP_SHIFT) - 1)}"
        case EventKind.WAITING:
            return f"waits for rank {event.index}"
    names = {each.value: each.name.lower().replace("_", " ") for each in EventKind}
    return event.text or names.get(event.kind, f"kind {event.kind}")
