"""Where the main thread of this worker stands: it waits for other workers, or it does something of its own."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.processes.host import StackLine, stack_of_thread

_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_WAITING = (
    f"{_OURS}comm{os.sep}",
    f"{_OURS}channel{os.sep}",
    f"{os.sep}torch{os.sep}distributed{os.sep}",
)
"""Whoever is in code of these folders waits for another worker, or will in a moment."""
_REDUCING = f"{_OURS}reduce{os.sep}"
"""The same, where it is the innermost code: a callback of the user's may be called from there."""
_RETURNED = "_wait_for_others"
"""The function of `worker.py` in which a worker is that makes no calls any more."""


@dataclass(frozen=True, slots=True)
class Stand:
    waits: bool
    """Whether it waits for other workers."""
    place: str
    """The line that runs, the user's if there is one: "train.py, line 31, in loss"."""


def look_at_main_thread(stack_of: Callable[[int | None], Sequence[StackLine]] = stack_of_thread) -> Stand:
    """Return where the main thread stands (local; in any thread)."""
    stack = stack_of(threading.main_thread().ident)
    if not stack:
        return Stand(waits=False, place="no line of Python")
    waits = stack[0].file.startswith(_REDUCING) or any(
        line.function == _RETURNED or any(folder in line.file for folder in _WAITING) for line in stack
    )
    shown = next((line for line in stack if not _is_of_a_library(line.file)), stack[0])
    return Stand(waits=waits, place=f"{Path(shown.file).name}, line {shown.number}, in {shown.function}")


def _is_of_a_library(file: str) -> bool:
    return file.startswith((_OURS, sys.base_prefix, "<")) or f"{os.sep}site-packages{os.sep}" in file
