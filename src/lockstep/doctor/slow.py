"""Where the time of a step goes, and which worker the others wait for: from the last steps in a recording.

    a step of rank 0   | loading | forward and backward | reducing | update | own code |
    a step of rank 1   | loading | forward and backward     | reduc. | update | own code |

What a rank spends in a collective is waiting until the last rank has come, and communication after that.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lockstep.doctor.diagnosis import capitalized
from lockstep.doctor.finding import is_running
from lockstep.doctor.slow_causes import UsageSample, cores_used_together, explain_slowness
from lockstep.doctor.stacks import read_main_stack, take_stack
from lockstep.doctor.system import read_usage
from lockstep.processes.host import boot_id
from lockstep.processes.user_line import find_user_stack_line
from lockstep.recording.file_format import EventKind, StepPhase
from lockstep.recording.reading import FileEvents, clock_offsets

PARTS: Final = (
    *("loading", "forward and backward", "waiting", "communication", "update", "saving", "evaluating", "callbacks"),
    "own code",
)
"""The parts of a worker's time; the last is what nothing was recorded of: the loop, printing."""
_TOGETHER: Final = frozenset({"waiting", "communication"})
"""The parts in which all workers take part."""
_MOST_STEPS: Final = 500
_FEWEST_STEPS: Final = 3
_OFTEN: Final = 0.6
"""A rank for which the others wait in this part of their waiting is behind them."""
_MATTERS: Final = 0.05
"""Waiting counts if it takes this part of the time."""
_NEARLY: Final = 0.1
_EXCESS: Final = 1.2
_OFTEN_SEEN: Final = 0.25
"""A line is named where a worker was in this part of the looks."""
_ADVICE: Final = {
    "loading": "Use more loading processes (loader_workers in a config, num_workers of a loader), do less in "
    "__getitem__, or keep the data on a faster disk.",
    "forward and backward": "That is the work itself: a faster device, a lower precision, or more workers.",
    "waiting": "The workers have unlike work or unlike speed: see who comes last.",
    "communication": "Fewer bytes (a lower precision of gradients), fewer steps with larger batches, or a faster link.",
    "update": "Use a fused or foreach optimizer.",
    "saving": "Save less often, in the background, or to a faster disk.",
    "evaluating": "Evaluate less often, or on fewer samples.",
    "callbacks": "Do less in that callback, do it more seldom, or on rank 0 alone.",
    "own code": "Look at what the loop does between two steps: printing, .item(), logging.",
}
_ADVICE_ON_ONE: Final = (
    "Look for what that rank does more than the others, and for other processes on its cores or its device."
)
_NUM_LOOKS: Final = 12


@dataclass(slots=True)
class Looks:
    num: int = 0
    """In how many looks its stack was read."""
    lines: Counter[str] = field(default_factory=Counter)
    """In how many of them it was at each line."""
    samples: list[UsageSample] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    rank: int
    num_steps: int
    seconds: float
    shares: Mapping[str, float]
    """Part of the time for each of `PARTS`; together 1, unless parts overlap."""
    came_last: float
    """In which part of the waiting in collectives it was the last to come, for which the others waited."""
    pid: int = 0
    shards_per_step: float = 0.0
    """How many shards it runs in a step; 0 for a wrapper."""
    samples_per_step: float = 0.0
    callback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReport:
    text: str
    bound: str
    """The part that takes most; empty where too few steps were recorded."""
    behind: int | None
    """The rank for which the others wait; None if there is none."""
    workers: tuple[TimeUse, ...]
    causes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the system says of a rank that is slow, in sentences; of those for which there is something to say."""


def find_slow(
    files: Sequence[FileEvents],
    usage: Mapping[int, Sequence[UsageSample]] = MappingProxyType({}),
    looks: Mapping[int, Looks] = MappingProxyType({}),
    load: float = 0.0,
) -> SlowReport:
    """Return where the time of the last steps went, and why; `usage` and `looks` are by process.

    `load` is how many processes run or wait for a core on this host; 0 if that is not known.
    """
    by_last_begin = sorted(files, key=lambda each: int(each.table["begin"].max()) if len(each.table) else 0)
    last_of_rank = {each.header.rank: each for each in by_last_begin}
    files = [each for _, each in sorted(last_of_rank.items())]  # ranks may have been given to others
    offsets = clock_offsets(files)
    arrivals = [
        {number: (begin - offset, end - offset) for number, (begin, end) in file.collectives().items()}
        for file, offset in zip(files, offsets, strict=True)
    ]
    last = _arrivals(arrivals)
    uses = []
    for file, offset, own in zip(files, offsets, arrivals, strict=True):
        use = _time_use(file, offset, own, last)
        if use is not None:
            uses.append(use)
    if not uses:
        text = f"Fewer than {_FEWEST_STEPS} steps are in the recording: there is nothing to say of its speed yet."
        return SlowReport(text=text, bound="", behind=None, workers=())
    samples = {use.pid: _samples_of(usage.get(use.pid, ()), looks.get(use.pid)) for use in uses}
    used_by_job = cores_used_together([*samples.values()])
    causes = {use.rank: _causes(use, samples[use.pid], looks.get(use.pid), load, used_by_job) for use in uses}
    return _judge(uses, {rank: found for rank, found in causes.items() if found})


def _samples_of(usage: Sequence[UsageSample], looks: Looks | None) -> Sequence[UsageSample]:
    return usage if looks is None or len(usage) > len(looks.samples) else looks.samples


def _causes(
    use: TimeUse, samples: Sequence[UsageSample], looks: Looks | None, load: float, used_by_job: Mapping[int, float]
) -> tuple[str, ...]:
    found = explain_slowness(samples, load, sum(use.shares[name] for name in _TOGETHER), used_by_job)
    if looks is not None and looks.lines:
        (line, number), *_ = looks.lines.most_common(1)
        if number > looks.num * _OFTEN_SEEN:
            found.append(f"it was at {line} in {number} of {looks.num} looks")
    return tuple(found)


def _arrivals(arrivals: Sequence[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Return when the first and the last rank came to each collective that all have."""
    if len(arrivals) < 2:  # noqa: PLR2004 - alone nobody is waited for
        return {}
    common = set(arrivals[0]).intersection(*arrivals[1:])
    begins = {number: [each[number][0] for each in arrivals] for number in common}
    return {number: (min(moments), max(moments)) for number, moments in begins.items()}


def _time_use(
    file: FileEvents,
    offset: int,
    own: Mapping[int, tuple[int, int]],
    last: Mapping[int, tuple[int, int]],
) -> TimeUse | None:
    table = file.table
    starts = step_starts(table)
    if len(starts) <= _FEWEST_STEPS:
        return None
    starts = starts[-_MOST_STEPS - 1 :]
    begin, end = int(starts[0]), int(starts[-1])
    total = end - begin
    phases = table[table["kind"] == EventKind.PHASE]

    is_within = (table["end"] > 0) & (table["begin"] >= begin) & (table["end"] <= end)

    def spent(kind: EventKind) -> int:
        rows = table[is_within & (table["kind"] == kind)]
        return int((rows["end"] - rows["begin"]).sum())

    def in_phase(number: int) -> int:
        positions = np.flatnonzero(phases["index"][:-1] == number)
        lengths = phases["begin"][positions + 1] - phases["begin"][positions]
        return int(lengths[(phases["begin"][positions] >= begin) & (phases["begin"][positions] < end)].sum())

    waiting, transferring, num_last, num = _split(own, last, begin - offset, end - offset)
    joint = spent(EventKind.REDUCING) + in_phase(StepPhase.AGREE)
    waiting_part = waiting / max(waiting + transferring, 1)
    work = spent(EventKind.SHARD) or _forward_and_backward(table, begin, end)
    saving = table[is_within & (table["kind"] == EventKind.SAVING)]
    is_blocking = np.array([file.text(int(place)) != "write" for place in saving["text"]], dtype=bool)
    is_shard = (table["kind"] == EventKind.SHARD) & (table["begin"] >= begin) & (table["begin"] < end)
    nanoseconds = {
        "loading": spent(EventKind.LOADING),
        "forward and backward": max(work - spent(EventKind.REDUCING), 0),
        "waiting": joint * waiting_part,
        "communication": joint * (1 - waiting_part),
        "update": in_phase(StepPhase.COMMIT),
        "saving": int((saving["end"] - saving["begin"])[is_blocking].sum()) if len(saving) else 0,
        "evaluating": spent(EventKind.EVALUATING),
        "callbacks": spent(EventKind.CALLBACK),
    }
    shares = {name: value / total for name, value in nanoseconds.items()}
    shares["own code"] = max(1 - sum(shares.values()), 0.0)
    return TimeUse(
        rank=file.header.rank,
        num_steps=len(starts) - 1,
        seconds=total / 1e9,
        shares=shares,
        came_last=num_last / max(num, 1),
        pid=file.header.pid,
        shards_per_step=int(is_shard.sum()) / (len(starts) - 1),
        samples_per_step=int(table["size"][is_shard].sum()) / (len(starts) - 1),
        callback=_longest_callback(file, table[is_within & (table["kind"] == EventKind.CALLBACK)]),
    )


def _longest_callback(file: FileEvents, rows: NDArray[Any]) -> str:
    spent: Counter[int] = Counter()
    for place, nanoseconds in zip(rows["text"].tolist(), (rows["end"] - rows["begin"]).tolist(), strict=True):
        spent[place] += nanoseconds
    return file.text(spent.most_common(1)[0][0]) if spent else ""


def step_starts(table: NDArray[Any]) -> NDArray[Any]:
    """Return when steps began: their first phase, or the forward of a wrapper that is followed by a backward."""
    prepared = table["begin"][(table["kind"] == EventKind.PHASE) & (table["index"] == StepPhase.PREPARE)]
    if len(prepared):
        return np.asarray(prepared)
    return np.asarray(table["begin"][table["kind"] == EventKind.BACKWARD])


def _forward_and_backward(table: NDArray[Any], begin: int, end: int) -> int:
    """Return the time from each forward of a wrapper to the end of its backward."""
    forwards = table["begin"][table["kind"] == EventKind.FORWARD]
    rows = table[(table["kind"] == EventKind.BACKWARD) & (table["end"] > 0) & (table["begin"] >= begin)]
    rows = rows[rows["end"] <= end]
    positions = np.searchsorted(forwards, rows["begin"]) - 1
    starts = (
        np.where(positions >= 0, forwards[np.maximum(positions, 0)], rows["begin"]) if len(forwards) else rows["begin"]
    )
    return int((rows["end"] - starts).sum())


def _split(
    own: Mapping[int, tuple[int, int]], last: Mapping[int, tuple[int, int]], begin: int, end: int
) -> tuple[int, int, int, int]:
    """Return nanoseconds of waiting and of communication in collectives, and in how many of how many it came last.

    Calls count by how long the first rank waited for the last one: many short waits matter less than a long one.
    """
    waiting = transferring = num_last = num = 0
    for number, (first, moment) in last.items():
        began, ended = own[number]
        if not begin <= began < end:
            continue
        num += moment - first
        num_last += (moment - first) * (began == moment)
        waiting += max(min(moment, ended) - began, 0)
        transferring += max(ended - max(moment, began), 0)
    return waiting, transferring, num_last, num


def _judge(uses: Sequence[TimeUse], causes: Mapping[int, tuple[str, ...]]) -> SlowReport:
    waiting = [use.shares["waiting"] for use in uses]
    late = max(uses, key=lambda use: use.came_last)
    others = [use for use in uses if use is not late]
    is_behind = bool(others) and late.came_last >= _OFTEN and median(use.shares["waiting"] for use in others) > _MATTERS
    guide = late if is_behind else uses[0]
    bound = max(guide.shares, key=lambda name: guide.shares[name])
    is_late_in_a_part = False
    sentences = [f"{capitalized(bound)} bounds the step: {guide.shares[bound]:.0%} of the time of rank {guide.rank}."]
    if is_behind:
        share = median(use.shares["waiting"] for use in others)
        sentences.append(
            f"The others wait for rank {late.rank} for {share:.0%} of their time; it comes last in "
            f"{late.came_last:.0%} of these waits."
        )
        part, usual = _what_makes_late(late, others)
        share = late.shares[part]
        is_late_in_a_part = share - usual > _MATTERS and share > _EXCESS * usual
        if is_late_in_a_part:
            bound = part
            sentences[0] = f"{capitalized(part)} of rank {late.rank} bounds the step: {share:.0%} of its time."
            sentences.append(f"Its {part} takes {share / max(usual, 0.01):.1f} times as long as that of the others.")
    elif max(waiting) > _MATTERS:
        sentences.append(
            f"Ranks wait for each other for up to {max(waiting):.0%} of the time, now for one, now for another."
        )
    more_work = _about_unequal_work(late, others) if is_behind else []
    sentences += more_work
    if bound == "callbacks" and guide.callback:
        sentences.append(f"Most of it is in {guide.callback}.")
    slow_ones = [late] if is_behind else uses
    sentences += [f"Rank {use.rank}: {'; '.join(causes[use.rank])}." for use in slow_ones if use.rank in causes]
    is_slower = is_behind and bound == "forward and backward"
    num_shards = round(sum(use.shards_per_step for use in uses))
    if more_work and num_shards % len(uses):
        sentences.append(
            f"{num_shards} shards on {len(uses)} workers are unequal: make num_shards a multiple of the workers, which "
            "a new run can, or take a number of workers that divides it."
        )
    else:
        sentences.append(_ADVICE_ON_ONE if is_slower else _ADVICE[bound])
    second = max((name for name in PARTS if name != bound), key=lambda name: guide.shares[name])
    is_close = guide.shares[second] > guide.shares[bound] - _NEARLY
    if not is_late_in_a_part and is_close and second != "waiting":
        sentences.insert(1, f"{capitalized(second)} takes nearly as much: {guide.shares[second]:.0%}.")
        sentences.append(_ADVICE[second])
    return SlowReport(
        text=" ".join(sentences),
        bound=bound,
        behind=late.rank if is_behind else None,
        workers=tuple(uses),
        causes=causes,
    )


def _what_makes_late(late: TimeUse, others: Sequence[TimeUse]) -> tuple[str, float]:
    """Return in which part a worker spends most more time than the others, and the part of their time that these do.

    The difference counts, not the ratio: a part that is short for all may be many times as long for one. The time in
    collectives makes nobody late: for the last one all of it is communication, for the others some of it is waiting.
    """
    usual = {name: median(use.shares[name] for use in others) for name in PARTS if name not in _TOGETHER}
    part = max(usual, key=lambda name: late.shares[name] - usual[name])
    return part, usual[part]


def _about_unequal_work(late: TimeUse, others: Sequence[TimeUse]) -> list[str]:
    usual = median(use.samples_per_step for use in others)
    if not usual or late.samples_per_step <= _EXCESS * usual:
        return []
    work = f"{late.shards_per_step:.1f} shards with {late.samples_per_step:.0f} samples in a step"
    return [f"It has more work: {work}, the others {usual:.0f} samples."]


def sample_workers(files: Sequence[FileEvents]) -> dict[int, Looks]:
    """Look at the workers of this host that run, for about two seconds; return what was seen, by process (local)."""
    boot = boot_id()
    living = [file for file in files if file.header.boot == boot and is_running(file.header)]
    found = {file.header.pid: Looks() for file in living}
    for _ in range(_NUM_LOOKS) if living else ():
        for file in living:
            looks, header = found[file.header.pid], file.header
            if usage := read_usage(header.pid):
                looks.samples.append(UsageSample(time.monotonic_ns(), usage))
            stack = read_main_stack(take_stack(file.path.with_suffix(".stacks"), header.pid, header.stack_signal))
            frame = find_user_stack_line(stack)
            looks.num += bool(stack)
            if frame is not None:
                looks.lines[str(frame)] += 1
    return found


def recorded_usage(launcher: FileEvents | None, workers: Sequence[FileEvents] = ()) -> dict[int, list[UsageSample]]:
    """Return what the launcher, if any, recorded of each process, from the last sample before the first event on."""
    if launcher is None:
        return {}
    since_ns = min((int(file.table["begin"].min()) for file in workers if len(file.table)), default=0)
    rows = launcher.table[launcher.table["kind"] == EventKind.USAGE]
    found: dict[int, list[UsageSample]] = {}
    values: dict[int, dict[str, int]] = {}
    moments: dict[int, int] = {}
    for row in rows:
        pid, moment, name = int(row["index"]), int(row["begin"]), launcher.text(int(row["text"]))
        usage = values.get(pid)
        if usage is None or name in usage:  # each sample has each name once
            values[pid] = usage = {}
            moments[pid] = moment
            found.setdefault(pid, []).append(UsageSample(moment, usage))
        usage[name] = int(row["size"])
    return {pid: _from(samples, since_ns) for pid, samples in found.items()}


def _from(samples: Sequence[UsageSample], since_ns: int) -> list[UsageSample]:
    first = max((number for number, each in enumerate(samples) if each.moment_ns <= since_ns), default=0)
    return list(samples[first:])
