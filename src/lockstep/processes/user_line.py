"""Which line is the user's: for messages, and for warnings that point at it. The one list of what is not is here."""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from lockstep.processes.host import StackLine, stack_of_thread

_OURS: Final = Path(__file__).parents[1]
_TORCH: Final = getattr(find_spec("torch"), "origin", None)  # by itself: it may have been built from source
_STDLIB: Final = sysconfig.get_path("stdlib")
_CORE: Final = (
    *(f"{folder}{os.sep}" for folder in (_OURS, _OURS.with_name("lockstep_command"))),
    *([f"{Path(_TORCH).parent}{os.sep}"] if _TORCH else []),
    *("<frozen ", "<eval_with_key>"),  # Python's own modules, and what torch.fx generates
)
_INSTALLED: Final = (
    *(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib", "scripts")),
    *(f"{_STDLIB}/{name}/" for name in ("site-packages", "dist-packages")),
)
LIBRARIES: Final = (*_CORE, *_INSTALLED, f"{_STDLIB}{os.sep}")
"""How the file names of code begin that is not the user's: installed libraries, Python's own, and ours."""
_STARTS: Final = (
    str(_OURS / "launch" / "worker.py"),
    *(str(Path(_STDLIB) / "multiprocessing" / name) for name in ("spawn.py", "forkserver.py")),
)
"""What a line of `python -c` calls that begins a worker, or a process of multiprocessing."""
_START_MODULES: Final = frozenset({"lockstep.launch.worker", "multiprocessing.forkserver"})


@dataclass(frozen=True, slots=True)
class CodeLine:
    file: str
    """Path of the file; empty if the line is not known."""
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.file else "a line that is not known"


NO_LINE = CodeLine("", 0)


def user_line() -> CodeLine:
    """Return the innermost line of this thread outside installed libraries.

    Where a program is installed itself there is none: then the innermost that is neither torch's, Python's nor ours.
    """
    frame = _find_caller(sys._getframe(1))  # noqa: SLF001 - Python's name
    return NO_LINE if frame is None else CodeLine(frame.f_code.co_filename, frame.f_lineno)


def find_user_line(thread_id: int | None = None) -> str:
    """Return that line as `"train.py:12"`; empty if there is none (local).

    `thread_id` is a thread that makes the call and waits for it, if that is not this one.
    """
    line = user_line() if thread_id is None else find_user_stack_line(stack_of_thread(thread_id))
    return f"{line.file}:{line.number}" if line is not None and line.file else ""


def stacklevel_of_user() -> int:
    """Return the level, for a warning of our caller's, of the line that `user_line` returns."""
    frame = sys._getframe(1)  # noqa: SLF001 - Python's name
    end = _find_caller(frame)
    if end is None:
        return 1
    level = 1
    while frame is not end:
        # Frames of the import system count for no level.
        level += not frame.f_code.co_filename.startswith("<frozen importlib")
        assert frame.f_back is not None
        frame = frame.f_back
    return level


def find_user_frame(frame: FrameType | None, is_library: Callable[[str], bool] | None = None) -> FrameType | None:
    """Return this frame, or the first caller of it, that is of no library, nor of the line that begins a worker.

    Only for frames of the thread that calls it: [Note: another thread's frames].
    """
    is_library = is_library or is_of_library
    while frame is not None and (is_library(frame.f_code.co_filename) or _is_start(frame)):
        frame = frame.f_back
    return frame


def end_at_user(trace: TracebackType | None) -> None:
    """Take off a traceback what the innermost line of the user's has called; nothing where there is none."""
    last = None
    while trace is not None:
        if not is_of_library(trace.tb_frame.f_code.co_filename):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def find_user_stack_line(stack: Sequence[StackLine]) -> StackLine | None:
    """Return the first line of a stack, innermost first, that is of no library, nor of what begins a worker."""
    is_worker = len(stack) > 1 and stack[-1].file == "<string>" and stack[-2].file in _STARTS
    return next((line for line in stack[: -1 if is_worker else None] if not line.file.startswith(LIBRARIES)), None)


def _find_caller(frame: FrameType) -> FrameType | None:
    return find_user_frame(frame) or find_user_frame(frame, _is_core)


@cache
def is_of_library(file: str) -> bool:
    """Whether the code in a file is not the user's."""
    return file.startswith(LIBRARIES)


def _is_core(file: str) -> bool:
    """Return whether a file is torch's, Python's or ours; installed programs may lie in a folder below Python's."""
    return file.startswith(_CORE) or (file.startswith(_STDLIB + os.sep) and not file.startswith(_INSTALLED))


def _is_start(frame: FrameType) -> bool:
    """Return whether a frame is of the line of `python -c` with which a worker, or a spawned process, begins."""
    if frame.f_back is not None or frame.f_code.co_filename != "<string>":
        return False
    main = getattr(frame.f_globals.get("main"), "__module__", "")
    return main in _START_MODULES or "spawn_main" in frame.f_globals
