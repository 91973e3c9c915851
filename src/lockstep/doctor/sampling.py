"""A short look at workers that run: at which lines of the user's code they are, and what they use meanwhile."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lockstep.doctor.finding import is_running
from lockstep.doctor.slow_causes import UsageSample
from lockstep.doctor.stacks import read_main_stack, take_stack, user_frame
from lockstep.doctor.usage import read_usage
from lockstep.processes.host import boot_id
from lockstep.recording.file_format import EventKind
from lockstep.recording.reading import FileEvents

_NUM_LOOKS: Final = 12


@dataclass(slots=True)
class Looks:
    """What was seen of one worker."""

    num: int = 0
    """In how many looks its stack was read."""
    lines: Counter[str] = field(default_factory=Counter)
    """In how many of them it was at each line."""
    samples: list[UsageSample] = field(default_factory=list)


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
            frame = user_frame(stack)
            looks.num += bool(stack)
            if frame is not None:
                looks.lines[str(frame)] += 1
    return found


def recorded_usage(launcher: FileEvents, since_ns: int) -> dict[int, list[UsageSample]]:
    """Return what the launcher has recorded of each process since a moment of its clock, and the last sample before."""
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
