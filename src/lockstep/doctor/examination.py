"""Looking at a job: its recording, and what the system knows of its processes now."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.doctor.activity import Activity, last_activity
from lockstep.doctor.diagnosis import STALL_SECONDS, LoadingProcess, Verdict, WorkerState, diagnose
from lockstep.doctor.finding import is_running
from lockstep.doctor.stacks import read_main_stack, take_stack
from lockstep.doctor.system import Neighbour, children_of, find_neighbours, look_at, watch_processes
from lockstep.processes.host import boot_id
from lockstep.processes.user_line import find_user_stack_line
from lockstep.recording.file_format import EventKind
from lockstep.recording.reading import FileEvents, read_recording

_SAMPLE_SECONDS = 0.25
"""Over this time the use of cores is measured."""
_LOADER = "torch/utils/data/dataloader.py"
"""A worker whose stack has a line of this file, waits for its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    recording: Path
    program: str
    workers: tuple[WorkerState, ...]
    """The present workers, or the last ones of a job that has ended."""
    stacks: dict[int, str]
    verdict: Verdict
    late_stacks: frozenset[int] = frozenset()
    """The ranks that were asked for their stacks and run, but have not answered in time."""
    neighbours: tuple[Neighbour, ...] = ()
    """Processes of this machine that are not of the job and use its cores; none are looked for if the job is gone."""


def examine(recording: Path, *, wants_stacks: bool = False, stall_seconds: float = STALL_SECONDS) -> Examination:
    """Look at a job (local); workers that stand still, or all if wanted, are asked for their stacks."""
    files = last_job(read_recording(recording))
    launcher = next((file for file in files if file.is_launchers), None)
    present = [file for file in files if not file.is_launchers]
    ends = {} if launcher is None else {each.size: each.text for each in launcher.events(EventKind.WORKER_ENDED)}
    now = time.monotonic_ns() if any(_is_here(file) for file in present) else _last_moment(files)
    states = [_look(file, ends, now) for file in present]
    launchers = [] if launcher is None or not _is_here(launcher) else [launcher.header.pid]
    states, neighbours = _with_cpu_share(states, launchers)
    stacks: dict[int, str] = {}
    late = set()
    for number, (file, state) in enumerate(zip(present, states, strict=True)):
        if state.facts is not None and (wants_stacks or state.seconds > stall_seconds):
            states[number], stacks[state.rank] = _with_stack(file, state)
            if not stacks[state.rank] and file.header.stack_signal and not state.facts.is_stopped:
                late.add(state.rank)
    if launcher is not None and _is_here(launcher):
        states += _not_recorded(launcher, {state.pid for state in states})
    members = _of_the_present({file.header.pid: file.header.generation for file in present}, states)
    workers = tuple(sorted(_living_or_last(members), key=lambda each: each.rank))
    return Examination(
        recording=recording,
        program=present[0].header.program if present else "",
        workers=workers,
        stacks={rank: text for rank, text in stacks.items() if text},
        late_stacks=frozenset(late),
        verdict=diagnose(workers, stall_seconds, _elsewhere(present, workers) if launcher is None else ()),
        neighbours=tuple(neighbours),
    )


def _elsewhere(files: Sequence[FileEvents], workers: Sequence[WorkerState]) -> list[int]:
    world_size = max((file.header.world_size for file in files), default=0)
    return sorted(set(range(world_size)) - {worker.rank for worker in workers})


def last_job(files: Sequence[FileEvents]) -> list[FileEvents]:
    """Return the files of the last start of a job: those since its launcher, or the last of each worker."""
    launchers = [file for file in files if file.is_launchers]
    if launchers:
        last = max(launchers, key=lambda file: file.header.opened_wall_ns)
        since = last.header.opened_wall_ns
        return [*(file for file in files if not file.is_launchers and file.header.opened_wall_ns >= since), last]
    newest: dict[int, FileEvents] = {}
    for file in sorted(files, key=lambda each: each.header.opened_wall_ns):
        newest[file.header.worker] = file
    return list(newest.values())


def _is_here(file: FileEvents) -> bool:
    return file.header.boot == boot_id()


def _last_moment(files: Sequence[FileEvents]) -> int:
    return max(
        (int(max(file.table["begin"].max(), file.table["end"].max())) for file in files if len(file.table)), default=0
    )


def _not_recorded(launcher: FileEvents, recorded: set[int]) -> list[WorkerState]:
    """Return the workers that run and have not come to Lockstep yet."""
    found = []
    ended = {event.size for event in launcher.events(EventKind.WORKER_ENDED)}
    for event in launcher.events(EventKind.WORKER_STARTED):
        facts = look_at(event.size)
        if facts is not None and event.size not in recorded | ended and is_running(launcher.header):
            seconds = (time.monotonic_ns() - event.begin) / 1e9
            doing = "has not imported Lockstep yet"
            activity = Activity(doing=doing, since_ns=event.begin, is_inside=False, is_starting=True)
            found.append(WorkerState(rank=event.index, pid=event.size, activity=activity, seconds=seconds, facts=facts))
    return found


def _look(file: FileEvents, ends: Mapping[int, str], now: int) -> WorkerState:
    activity = last_activity(file)
    header = file.header
    is_alive = _is_here(file) and is_running(header)
    return WorkerState(
        rank=header.rank,
        pid=header.pid,
        activity=activity,
        seconds=max(now - activity.since_ns, 0) / 1e9,
        facts=look_at(header.pid) if is_alive else None,
        is_here=_is_here(file) or bool(activity.has_ended),
        how_ended="" if is_alive else ends.get(header.pid, ""),
    )


def _with_cpu_share(
    states: Sequence[WorkerState], launchers: Sequence[int]
) -> tuple[list[WorkerState], list[Neighbour]]:
    """Look for a moment at what the workers use of cores, and what other processes do."""
    began = time.monotonic()
    neighbours: list[Neighbour] = []
    if any(state.facts is not None for state in states):
        watched = watch_processes()
        time.sleep(_SAMPLE_SECONDS)
        job = {state.pid for state in states if state.facts is not None} | {*launchers, os.getpid()}
        neighbours = find_neighbours(watched, job)
    found = []
    for state in states:
        later = look_at(state.pid) if state.facts is not None else None
        if state.facts is None or later is None:
            found.append(state)
            continue
        share = (later.cpu_seconds - state.facts.cpu_seconds) / (time.monotonic() - began)
        found.append(replace(state, facts=later, cpu_share=share))
    return found, neighbours


def _with_stack(file: FileEvents, state: WorkerState) -> tuple[WorkerState, str]:
    path, number = file.path.with_suffix(".stacks"), file.header.stack_signal
    text = take_stack(path, state.pid, number)
    stack = read_main_stack(text)
    frame = find_user_stack_line(stack)
    is_loading = state.activity.is_loading or any(each.file.endswith(_LOADER) for each in stack)
    loading = []
    for child in children_of(state.pid) if is_loading else ():
        facts = look_at(child)
        if facts is not None:
            own = find_user_stack_line(read_main_stack(take_stack(path, child, number)))
            loading.append(LoadingProcess(pid=child, facts=facts, line="" if own is None else str(own)))
    line = "" if frame is None else str(frame)
    return replace(state, line=line, loading=tuple(loading), is_loading=is_loading), text


def _of_the_present(generations: Mapping[int, int], states: Sequence[WorkerState]) -> list[WorkerState]:
    """Leave out who was lost before the others continued, and new workers that wait to join: no step needs them."""
    runs = [generations.get(state.pid, 0) for state in states if state.facts is not None]
    last = max(runs or generations.values(), default=0)  # of a job that has ended: the workers with which it did
    if not last:
        return list(states)

    def is_needed(state: WorkerState) -> bool:
        is_old = generations.get(state.pid, 0) < last
        return not (is_old and (state.has_ended or state.activity.is_starting))

    return [state for state in states if is_needed(state)]


def _living_or_last(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Return one worker of each rank: where ranks were given to others, those that run, or did something last."""
    chosen: dict[int, WorkerState] = {}
    for state in sorted(states, key=lambda each: (each.facts is not None, -each.seconds)):
        chosen[state.rank] = state
    return list(chosen.values())
