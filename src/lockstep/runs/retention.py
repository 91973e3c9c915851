"""Which checkpoints of a run are kept. Pure.

The newest `keep` checkpoints are kept, and the best one by a metric. A damaged file does not count as one of them.
It is removed when `keep` intact ones are newer. So the only intact checkpoint is never removed.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    global_step: int
    """Number of updates before it was written."""
    is_intact: bool
    """Whether its header is intact and its length right."""
    score: float | None
    """Its score, higher is better; None if it is not known."""


def score_of(metrics: Mapping[str, float | None], wanted: str | None) -> float | None:
    """Return the score of a checkpoint, higher is better; None if it is not known.

    Args:
        metrics: Means over the test set from its manifest.
        wanted: `keep_best` of the config: a name, `-name` if lower is better, or None.
    """
    if wanted is None:
        return None
    value = metrics.get(wanted.removeprefix("-"))
    if value is None or not math.isfinite(value):
        return None
    return -value if wanted.startswith("-") else value


def check_metric_name(wanted: str | None, measured: Mapping[str, float]) -> None:
    """Check that the metric of `keep_best` was measured.

    Raises:
        ConfigError: It was not.
    """
    if wanted is not None and wanted.removeprefix("-") not in measured:
        near = difflib.get_close_matches(wanted.removeprefix("-"), [*measured], n=1)
        guess = f"Did you mean {'-' if wanted.startswith('-') else ''}{near[0]}? " if near else ""
        known = " or ".join(f"{sign}{name}" for name in measured for sign in ("", "-") if f"{sign}{name}" != "loss")
        raise ConfigError(
            f"keep_best is {wanted!r}, but no such metric is measured on the test set. "
            + (
                f"{guess}Expected {known}; - means that lower is better."
                if known
                else "It needs a test set: data returned None."
            )
            + " (LS808)"
        )


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the best intact checkpoint, the oldest if scores are equal; None if no score is known."""
    scored = [(each.score, -each.global_step, each) for each in saved if each.is_intact and each.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def choose_checkpoints_to_remove(saved: Sequence[SavedCheckpoint], keep: int, written: int) -> list[SavedCheckpoint]:
    """Return the checkpoints to remove.

    Args:
        saved: All checkpoints of a run.
        keep: Number of the newest checkpoints to keep, at least 1; the best one is kept too.
        written: Number of updates of the checkpoint just written. Checkpoints with more updates are from before the run
            was resumed from an earlier one. They are ignored, and overwritten when the run reaches their
            steps again.
    """
    newest_first = sorted((each for each in saved if each.global_step <= written), key=lambda each: -each.global_step)
    best = find_best(saved)
    removed: list[SavedCheckpoint] = []
    num_intact = 0
    for each in newest_first:
        if num_intact >= keep and each is not best:
            removed.append(each)
        num_intact += each.is_intact
    return removed
