"""What a rule reports."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a finding matters."""

    MISTAKE = "mistake"
    """It trains something else than meant, fails, or waits for ever."""
    NOTE = "note"
    """It works, and is seldom meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    rule: str
    level: Level
    line: int
    """The line, counted from 1."""
    text: str
    """What is wrong there, and what comes of it."""
    mended: str
    """The line as it should be, or the line to add."""
