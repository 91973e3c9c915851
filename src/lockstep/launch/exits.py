"""Describing how workers ended: exit codes and text come in, text goes out.

Pure, but for `read_oom_kills` and `KillerNames`, which calls it.
"""

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

from lockstep.errors import LockstepError, PeerFailedError, PeerLostError, ReductionError, WorkerFailure
from lockstep.processes.host import read_control_groups
from lockstep.processes.user_line import LIBRARIES

UNKNOWN_KILLER = "by another process or by the kernel because memory ran out"
_SIGNAL_BASE = 128
# [Note: patience] How long a launcher waits, for functions and scripts alike.
EARLIER_FAILURE_SECONDS = 0.3
"""After the first failure: for a report, or the end, of one that happened before it."""
SURE_SECONDS = 0.05
"""The same where no other worker's failure leads to the one that was seen."""
ROOT_CAUSE_SECONDS = 5.0
"""The same where each failure is a consequence of another one."""
GRACE_SECONDS = 1.0
"""How long workers may take to end when asked to, before they are killed."""
KILLED_SECONDS = 5.0
"""How long to wait for killed processes: the kernel may have to finish an operation of theirs first."""
SLOW_END_SECONDS = 5.0
"""After how long it is told that a worker which is done, by its report, still runs, ..."""
RAISED_SECONDS, TEARDOWN_SECONDS = 15.0, 30.0
"""... and after how long it is ended: one that has raised, for which others wait, and one that has returned."""
_SAME_KILLS_SECONDS = 1.0
"""Ends within this time may be one kill: the out-of-memory killer ends a whole control group at once."""
_MOST_OF_REASON = 500
_MOST_OF_ERROR = 100
_MOST_OF_TRACEBACK = 20_000
"""So many characters of what a user's exception says are shown: it may hold a whole tensor."""
CONSEQUENCES = (PeerFailedError, PeerLostError, ReductionError)
"""Errors that are probably a consequence of another worker's failure, if another worker has any other error."""
_HEADER = "Traceback (most recent call last):"
_CONNECTORS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The first line of an exception, after the frames of its traceback."""
_RANK = re.compile(r"\[rank\d+\]: ")
"""What torch puts before each line of a traceback, where there is a group."""
_PLACE = re.compile(r'  File ".*", line \d+')
_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def exit_status(code: int) -> int:
    """Return the exit code that a shell reports: 128 + N if signal N ended the process, for which `code` is -N."""
    return code if code >= 0 else _SIGNAL_BASE - code


def describe_exit(code: int, *, killer: str = UNKNOWN_KILLER, place: str = "") -> str:
    """Return how a process ended; `code` is -N for signal N."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = {known.value: known.name for known in signal.Signals}.get(-code, f"signal {-code}")
    if name == "SIGKILL" and killer:
        return f"killed by {name}, {killer}"
    return f"killed by {name} at {place}" if place else f"killed by {name}"


def describe_failures(failures: Sequence[WorkerFailure], *, is_shown: bool = False) -> str:
    """Return which worker failed first, with its traceback, and which others failed after it.

    The first in time comes first. `is_shown`: the traceback was printed already, so its last line and place are enough.
    """
    first, *others = failures
    message = f"Worker {first.rank} failed first: {_shorten(first.reason, _MOST_OF_REASON)} (LS601)"
    if first.traceback and is_shown:
        lines = first.traceback.rstrip().splitlines()
        frames = [line.strip() for line in lines if _PLACE.match(line)]
        place = f"\n  {frames[-1]}" if frames else ""
        error = _last_error(first.traceback) or lines[-1]
        if len(error) > _MOST_OF_ERROR:  # it was printed, and one of ours has several sentences
            error = f"{error[:_MOST_OF_ERROR].rpartition(' ')[0]} ..."
        message += f"{place}\n{error}\nIts traceback is above."
    elif first.traceback:
        trace = first.traceback.rstrip()
        if isinstance(first.error, LockstepError) and has_users_frame(trace):
            trace = users_part(trace)
        message += f"\n\nTraceback of worker {first.rank}:\n{_shorten(trace, _MOST_OF_TRACEBACK)}"
    alike = [str(other.rank) for other in others if _error_of(other) == _error_of(first)]
    after = [
        f"worker {other.rank} ({_shorten(_error_of(other), _MOST_OF_REASON)})"
        for other in others
        if _error_of(other) != _error_of(first)
    ]
    if alike:
        message += f"\n\nFailed in the same way: worker {', '.join(alike)}."
    if after:
        message += f"\n\nFailed after it, probably because of it: {', '.join(after)}."
    return message


def describe_waiting(message: str) -> str:
    """Return the line that is printed while the other workers end, from the message that follows when they have."""
    first = _shorten(message.splitlines()[0].removesuffix(" (LS601)").rstrip("."), _MOST_OF_REASON)
    return f"{first}. The other workers are being stopped. (LS601)"


def _shorten(text: str, most: int) -> str:
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]} ... ({left_out} characters) ... {text[-most // 2 :]}"


def _error_of(failure: WorkerFailure) -> str:
    """Return the reason in one line, with the error that the traceback ends with: all scripts end with exit code 1."""
    reason = failure.reason.splitlines()[0]
    error = _last_error(failure.traceback)
    return reason if not error or error in reason else f"{reason}, {error}"


def says_another_failed(traceback: str) -> bool:
    """Return whether a traceback, as Python prints it, ends with an error that another worker's failure causes."""
    name = _last_error(traceback).partition(":")[0]
    return name in {f"{kind.__module__}.{kind.__qualname__}" for kind in CONSEQUENCES}


def _last_error(traceback: str) -> str:
    """Return the first line of the exception that a traceback ends with; empty if there is none."""
    lines = traceback.rstrip().splitlines()
    errors = [line for before, line in pairwise(lines) if before.startswith("  ") and _ERROR.match(line)]
    return errors[-1] if errors else ""


def users_part(traceback: str) -> str:
    """Return a traceback from the user's first frame on, or its last frame if it has none of the user's.

    What the user's last frame has called is left out too where the error is ours: it says what to do.
    """
    kept: list[str] = []
    for block in _blocks(traceback.splitlines()):
        starts = [number for number, line in enumerate(block) if _FRAME.match(line)]
        own = [number for number in starts if not _FRAME.match(block[number])[1].startswith(LIBRARIES)]  # type: ignore[index]
        end = next((number for number, line in enumerate(block) if line.startswith("lockstep.errors.")), None)
        if own and end is not None:
            inner = next((number for number in starts if number > own[-1]), end)
            del block[inner:end]
        kept += block[: starts[0]] + block[(own or starts[-1:])[0] :] if starts else block
    return "\n".join(kept)


def has_users_frame(traceback: str) -> bool:
    frames = filter(None, map(_FRAME.match, traceback.splitlines()))
    return any(not frame[1].startswith(LIBRARIES) for frame in frames)


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line == _HEADER and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def find_traceback(text: str) -> str:
    """Return the last traceback in a process' stderr, with the chained ones before it; empty if there is none.

    The traceback of a SyntaxError has no header. It begins with the line `File "...", line N`.
    """
    lines = _without_ranks(text.split("\n"))
    starts = [index for index, line in enumerate(lines) if line.endswith(_HEADER)]
    start = starts.pop() if starts else len(lines)
    # A traceback after "|" is of a member of an exception group, and is part of the group's traceback.
    while starts and ("|" in lines[start] or _is_connected(lines[starts[-1] : start])):
        start = starts.pop()
    places = [index for index, line in enumerate(lines) if _PLACE.match(line) and _begins(lines[index - 1 : index])]
    if places and (start == len(lines) or places[-1] > start):
        start = places[-1]
    return "\n".join(lines[start:])


def _without_ranks(lines: list[str]) -> list[str]:
    """Return lines as Python prints them: without the rank that torch puts before those of a traceback.

    Where the last traceback has ranks, what follows without one is not part of it.
    """
    marked = [index for index, line in enumerate(lines) if _RANK.match(line)]
    if not marked:
        return lines
    last = marked[-1]
    has_later_traceback = any(line.endswith(_HEADER) for line in lines[last + 1 :])
    return [_RANK.sub("", line, count=1) for line in (lines if has_later_traceback else lines[: last + 1])]


def _begins(before: Sequence[str]) -> bool:
    """Whether a `File` line after this line begins a traceback. Frames of one follow its header or another frame."""
    return not any(line.startswith(" ") or line.endswith(_HEADER) for line in before)


def _is_connected(lines: Sequence[str]) -> bool:
    """Whether these lines, up to the next header, end with the text that Python puts between chained exceptions."""
    texts = [line for line in lines if line.strip(" |")]
    return bool(texts) and texts[-1].strip(" |") in _CONNECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the out-of-memory killer has killed; None where that cannot be read."""

    group: int | None
    """Because this process' control group, such as a container, reached its memory limit."""
    host: int | None


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    return OomKills(group=_read_group(root), host=_read_counter(root / "proc/vmstat"))


def name_killer(before: OomKills, after: OomKills) -> str:
    """Return who sent a SIGKILL between two readings, as far as the counters show."""
    if None not in (before.group, after.group) and before.group != after.group:
        return (
            "by the kernel's out-of-memory killer: the memory limit of this control group (container, job) is reached"
        )
    if None in (before.host, after.host):
        return UNKNOWN_KILLER
    if before.host != after.host:
        return "probably by the kernel's out-of-memory killer, which killed processes on this host meanwhile"
    return "by another process: the kernel's out-of-memory killer has killed nothing meanwhile"


@final
class KillerNames:
    """Says, for one launch, who has sent the SIGKILL that has just ended a worker."""

    def __init__(self) -> None:
        self._before = self._latest = read_oom_kills()
        self._named_at = time.monotonic()

    def name(self) -> str:
        """Return who it was, by what the out-of-memory killer did since the kills that were named before."""
        now = time.monotonic()
        if now - self._named_at >= _SAME_KILLS_SECONDS:
            self._before = self._latest
        self._latest, self._named_at = read_oom_kills(), now
        return name_killer(self._before, self._latest)


def has_run_out_of_memory(before: OomKills, after: OomKills) -> bool:
    both = ((before.group, after.group), (before.host, after.host))
    return any(None not in counts and counts[0] != counts[1] for counts in both)


def _read_group(root: Path) -> int | None:
    """Read the counter of version 2 of control groups (memory.events), or of version 1 (memory.oom_control)."""
    groups = read_control_groups(root / "proc/self/cgroup")
    mounted = root / "sys/fs/cgroup"
    # In a container /sys/fs/cgroup is often the container's own group, but the path begins at the host's root.
    for folder, name in (
        (mounted / groups.get("", ""), "memory.events"),
        (mounted, "memory.events"),
        (mounted / "memory" / groups.get("memory", ""), "memory.oom_control"),
        (mounted / "memory", "memory.oom_control"),
    ):
        if (count := _read_counter(folder / name)) is not None:
            return count
    return None


def _read_counter(path: Path) -> int | None:
    try:
        found = _COUNTER.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
