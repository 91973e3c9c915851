"""Where in the user's code something happens: for messages, and for warnings that point at the user's line."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True, slots=True)
class CodeLine:
    file: str
    """Path of the file; empty if the line is not known."""
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.file else "a line that is not known"


NO_LINE = CodeLine("", 0)


def user_line() -> CodeLine:
    """Return the innermost line of this thread that is neither torch's nor ours."""
    frame, _ = _find_user_frame()
    return NO_LINE if frame is None else CodeLine(frame.f_code.co_filename, frame.f_lineno)


def stacklevel_of_user() -> int:
    """Return the level, for a warning of our caller's, of the innermost frame of the user's code."""
    frame, level = _find_user_frame()
    return 1 if frame is None else level - 1


def _find_user_frame() -> tuple[FrameType | None, int]:
    """Return that frame, and how many levels it is above our caller."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - Python's name for it
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return frame, level
