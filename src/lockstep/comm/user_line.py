"""The line of the user's code that makes a call, for messages."""

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_LIBRARIES: Final = (
    *(str(Path(module).parent) for module in (torch.__file__, str(Path(__file__).parent))),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    "<frozen ",
)


def find_user_line(thread_id: int | None = None) -> str:
    """Return the innermost line outside installed libraries, as `"train.py:12"`; empty if there is none (local).

    Args:
        thread_id: The thread that makes the call, if it is not this one: it waits for the call.
    """
    frame: FrameType | None = sys._getframe(1) if thread_id is None else sys._current_frames().get(thread_id)  # noqa: SLF001 - Python's names
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
