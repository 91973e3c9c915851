"""What another thread runs.

[Note: another thread's frames] `sys._current_frames` gives the frames of threads that run on while they are looked at.
From one frame to its caller the interpreter may change threads, and the frame may have been left meanwhile: then
`f_back` returns whatever lies in its place by now, or the process dies. (Seen with Python 3.11, where it was the value
that a generator had yielded.) `faulthandler` writes the stacks without giving another thread a turn.
"""

import faulthandler
import os
import re
import tempfile
from dataclasses import dataclass
from typing import Final

_THREAD: Final = re.compile(rb"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.MULTILINE)
_LINE: Final = re.compile(rb'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StackLine:
    """A line that a thread runs, or from which it was called."""

    file: str
    """The file, as its code was compiled."""
    number: int
    function: str


def stack_of_thread(thread_id: int | None) -> list[StackLine]:
    """Return what the thread with this `Thread.ident` runs, innermost line first, at most 100 lines; empty for none."""
    with (
        tempfile.TemporaryFile()
        if not hasattr(os, "memfd_create")
        else os.fdopen(os.memfd_create("stacks"), "w+b") as file
    ):
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        written = file.read()
    for found in _THREAD.finditer(written):
        if int(found[1], 16) == thread_id:
            return [
                StackLine(name.decode(errors="replace"), int(number), function.decode(errors="replace"))
                for name, number, function in _LINE.findall(found[2])
            ]
    return []
