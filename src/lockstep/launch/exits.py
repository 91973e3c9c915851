"""Describing how workers ended. Pure: exit codes and text come in, text goes out."""

import re
import signal
from collections.abc import Sequence
from itertools import pairwise

from lockstep.errors import WorkerFailure

UNKNOWN_KILLER = "by another process or by the kernel because memory ran out"
_SIGNAL_BASE = 128
_HEADER = "Traceback (most recent call last):"
_CONNECTORS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The first line of an exception, after the frames of its traceback."""
_PLACE = re.compile(r'  File ".*", line \d+')


def exit_status(code: int) -> int:
    """Return the exit code that a shell reports: 128 + N if signal N ended the process, for which `code` is -N."""
    return code if code >= 0 else _SIGNAL_BASE - code


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; "signal 40" for one without a name."""
    return {known.value: known.name for known in signal.Signals}.get(number, f"signal {number}")


def describe_exit(code: int, *, killer: str = UNKNOWN_KILLER) -> str:
    """Return how a process ended.

    Args:
        code: Its exit code; -N for signal N.
        killer: Who sent SIGKILL, if that ended it.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_name(-code)
    return f"killed by {name}, {killer}" if name == "SIGKILL" and killer else f"killed by {name}"


def describe_failures(failures: Sequence[WorkerFailure]) -> str:
    """Return which worker failed first, with its traceback, and which others failed after it.

    Args:
        failures: At least one, the first in time first.
    """
    first, *others = failures
    message = f"Worker {first.rank} failed first: {first.reason}"
    if first.traceback:
        message += f"\n\nTraceback of worker {first.rank}:\n{first.traceback.rstrip()}"
    alike = [str(other.rank) for other in others if _error_of(other) == _error_of(first)]
    after = [f"worker {other.rank} ({_error_of(other)})" for other in others if _error_of(other) != _error_of(first)]
    if alike:
        message += f"\n\nFailed in the same way: worker {', '.join(alike)}."
    if after:
        message += f"\n\nFailed after it, probably because of it: {', '.join(after)}."
    return message


def _error_of(failure: WorkerFailure) -> str:
    """Return the reason in one line, with the error that the traceback ends with: all scripts end with exit code 1."""
    reason = failure.reason.splitlines()[0]
    lines = failure.traceback.rstrip().splitlines()
    after_frames = [line for before, line in pairwise(lines) if before.startswith("  ") and _ERROR.match(line)]
    error = after_frames[-1] if after_frames else ""
    return reason if not error or error in reason else f"{reason}, {error}"


def find_traceback(text: str) -> str:
    """Return the last traceback in a process' stderr, with the chained ones before it; empty if there is none.

    The traceback of a SyntaxError has no header. It begins with the line `File "...", line N`.
    """
    lines = text.split("\n")
    starts = [index for index, line in enumerate(lines) if line.endswith(_HEADER)]
    start = starts.pop() if starts else len(lines)
    # A traceback after "|" is of a member of an exception group, and is part of the group's traceback.
    while starts and ("|" in lines[start] or _is_connected(lines[starts[-1] : start])):
        start = starts.pop()
    places = [index for index, line in enumerate(lines) if _PLACE.match(line) and _begins(lines[index - 1 : index])]
    if places and (start == len(lines) or places[-1] > start):
        start = places[-1]
    return "\n".join(lines[start:])


def _begins(before: Sequence[str]) -> bool:
    """Whether a `File` line after this line begins a traceback. Frames of one follow its header or another frame."""
    return not any(line.startswith(" ") or line.endswith(_HEADER) for line in before)


def _is_connected(lines: Sequence[str]) -> bool:
    """Whether these lines, up to the next header, end with the text that Python puts between chained exceptions."""
    texts = [line for line in lines if line.strip(" |")]
    return bool(texts) and texts[-1].strip(" |") in _CONNECTORS
