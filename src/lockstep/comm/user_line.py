"""The line of the user's code that makes a call, for messages."""

import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from lockstep.processes.host import StackLine, stack_of_thread

_LIBRARIES: Final = (
    *(str(Path(module).parent) for module in (torch.__file__, str(Path(__file__).parent))),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    "<frozen ",
)
_LAUNCH: Final = str(Path(__file__).parents[1] / "launch")


def find_user_line(thread_id: int | None = None) -> str:
    """Return the innermost line outside installed libraries, as `"train.py:12"`; empty if there is none (local).

    `thread_id` is a thread that makes the call and waits for it, if that is not this one.
    """
    if thread_id is not None:
        line = find_user_stack_line(stack_of_thread(thread_id))
        return "" if line is None else f"{line.file}:{line.number}"
    frame = find_user_frame(sys._getframe(1))  # noqa: SLF001 - Python's name
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def find_user_stack_line(stack: Sequence[StackLine]) -> StackLine | None:
    """Return the innermost line of a stack that is neither of an installed library nor of our launcher."""
    # The outermost line of a worker of `ls.launch` is that with which it begins: `python -c`.
    is_worker = len(stack) > 1 and stack[-1].file == "<string>" and stack[-2].file.startswith(_LAUNCH)
    return next((each for each in stack[: -1 if is_worker else None] if not each.file.startswith(_LIBRARIES)), None)


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return this frame, or the first caller of it, that is neither of an installed library nor of our launcher.

    Only for frames of the thread that calls it: [Note: another thread's frames].
    """
    while frame is not None and (frame.f_code.co_filename.startswith(_LIBRARIES) or _is_bootstrap(frame)):
        frame = frame.f_back
    return frame


def _is_bootstrap(frame: FrameType) -> bool:
    """Return whether a frame is of the lines with which a worker of `ls.launch` begins (`python -c`)."""
    if frame.f_back is not None or frame.f_code.co_filename != "<string>":
        return False
    return getattr(frame.f_globals.get("main"), "__module__", "") == "lockstep.launch.worker"


def warn_at_user_line(message: str) -> None:
    """Warn, and show the innermost line outside installed libraries as the place (local)."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's name
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry
    )
