"""How a run ended: the file `.ended` in its directory, not there while it runs, or if its launcher was killed."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.runs.directory import ENDED_NAME

_MAX_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding:
    state: str
    """finished, stopped, interrupted or failed."""
    reason: str = ""
    """Why it has failed, in one line."""
    time: str = ""
    """When, ISO 8601."""


def write_ending(run_dir: Path, state: str, reason: str = "") -> None:
    """Note how a run ended (local); a directory that was removed, or cannot be written, is left alone."""
    line = next(iter(reason.splitlines()), "")[:_MAX_REASON]
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    if run_dir.is_dir():
        with suppress(OSError):
            atomic_write_text(
                run_dir / ENDED_NAME, json.dumps(asdict(RunEnding(state=state, reason=line, time=now))) + "\n"
            )


def forget_ending(run_dir: Path) -> None:
    """Remove the note of an earlier ending, because the run goes on (local)."""
    with suppress(OSError):
        (run_dir / ENDED_NAME).unlink(missing_ok=True)


def read_ending(run_dir: Path) -> RunEnding | None:
    """Return how a run ended; None if nobody has noted it (local)."""
    try:
        return RunEnding(**json.loads((run_dir / ENDED_NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
