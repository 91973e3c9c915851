"""The report of the doctor: verdict first, then a row per worker, as text or as JSON; and the timeline."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lockstep.doctor.activity import PHASE_NAMES
from lockstep.doctor.diagnosis import WorkerState
from lockstep.doctor.examination import Examination
from lockstep.doctor.slow import PARTS, SlowReport
from lockstep.doctor.system import describe_neighbours
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


def print_examination(
    found: Examination, console: Console, *, with_stacks: bool, gpus: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Print the report as text; `gpus` is what each process uses of GPUs, in words."""
    console.print(found.verdict.text, highlight=False, markup=False, soft_wrap=True)
    if found.verdict.advice:
        console.print(found.verdict.advice, highlight=False, markup=False, soft_wrap=True)
    if found.workers:
        console.print(_table(found.workers, gpus))
    others = describe_neighbours(found.neighbours, os.cpu_count() or 1)
    on_gpus = [
        f"process {pid}: {text}" for pid, text in gpus.items() if pid not in {each.pid for each in found.workers}
    ]
    if on_gpus:
        others = f"{others} Other processes on its GPUs: {'; '.join(on_gpus)}.".strip()
    if others:
        console.print(others, highlight=False, markup=False, soft_wrap=True)
    program = f"program {found.program}, " if found.program else ""
    console.print(f"{program}recording {found.recording}", highlight=False, markup=False, soft_wrap=True)
    for rank, text in found.stacks.items() if with_stacks else ():
        console.print(f"\nrank {rank}:\n{text.rstrip()}", highlight=False, markup=False, soft_wrap=True)


def print_slow(found: SlowReport, recording: Path, console: Console) -> None:
    console.print(found.text, highlight=False, markup=False, soft_wrap=True)
    if found.workers:
        console.print(_slow_table(found))
    console.print(f"recording {recording}", highlight=False, markup=False, soft_wrap=True)


def _slow_table(found: SlowReport) -> Table:
    table = Table("rank", "steps", "ms per step", *PARTS, "came last")
    for use in found.workers:
        parts = (f"{use.shares[name]:.0%}" for name in PARTS)
        milliseconds = f"{use.seconds / use.num_steps * 1e3:.1f}"
        table.add_row(str(use.rank), str(use.num_steps), milliseconds, *parts, f"{use.came_last:.0%}")
    return table


def to_json(found: Examination) -> str:
    return json.dumps(
        {
            "recording": str(found.recording),
            "program": found.program,
            "verdict": {name: getattr(found.verdict, name) for name in ("kind", "text", "advice", "ranks")},
            "workers": [_values(worker) for worker in found.workers],
            "neighbours": [
                {"pid": each.pid, "user": each.user, "program": each.program, "cores": round(each.cores, 2)}
                for each in found.neighbours
            ],
            "stacks": {str(rank): text for rank, text in found.stacks.items()},
        },
        indent=2,
    )


def slow_to_json(found: SlowReport) -> str:
    return json.dumps(
        {
            "text": found.text,
            "bound": found.bound,
            "behind": found.behind,
            "causes": {str(rank): list(texts) for rank, texts in found.causes.items()},
            "workers": [
                {
                    "rank": use.rank,
                    "pid": use.pid,
                    "steps": use.num_steps,
                    "seconds_per_step": use.seconds / use.num_steps,
                    "shares": dict(use.shares),
                    "came_last": use.came_last,
                    "samples_per_step": use.samples_per_step,
                }
                for use in found.workers
            ],
        },
        indent=2,
    )


def _table(workers: Sequence[WorkerState], gpus: Mapping[int, str]) -> Table:
    table = Table("rank", "process", "step", "what it does", "since", "at", "state", "memory", "cores")
    if gpus:
        table.add_column("GPU")
    for worker in workers:
        facts = worker.facts
        table.add_row(
            str(worker.rank),
            str(worker.pid),
            str(worker.activity.step),
            worker.activity.doing,
            f"{worker.seconds:.1f} s",
            worker.line or worker.activity.line,
            _state(worker),
            "" if facts is None else f"{facts.memory_bytes / 2**20:,.0f} MiB",
            "" if facts is None else f"{worker.cpu_share:.1f}",
            *([gpus.get(worker.pid, "")] if gpus else ()),
        )
    return table


def _state(worker: WorkerState) -> str:
    if worker.facts is not None:
        return f"{worker.facts.state} ({worker.facts.call})" if worker.facts.call else worker.facts.state
    return (worker.how_ended or "ended") if worker.is_here else "on another host"


def _values(worker: WorkerState) -> dict[str, object]:
    facts = worker.facts
    return {
        "rank": worker.rank,
        "pid": worker.pid,
        "step": worker.activity.step,
        "doing": worker.activity.doing,
        "seconds": round(worker.seconds, 3),
        "waits_for": sorted(worker.activity.awaited - {-1}),
        "call": worker.activity.call,
        "line": worker.line or worker.activity.line,
        "state": _state(worker),
        "memory_bytes": None if facts is None else facts.memory_bytes,
        "swapped_bytes": None if facts is None else facts.swapped_bytes,
        "cpu_share": None if facts is None else round(worker.cpu_share, 3),
        "how_ended": worker.how_ended,
        "loading": [
            {"pid": each.pid, "state": each.facts.state, "call": each.facts.call, "line": each.line}
            for each in worker.loading
        ],
    }


# -- The timeline ------------------------------------------------------------------------------------------------------


def chrome_trace(files: Sequence[FileEvents]) -> str:
    """Return the timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

    A process per worker, and in it a row per kind of event. Times are in microseconds since the first event.
    """
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
