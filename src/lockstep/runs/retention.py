"""Which checkpoints of a run stay. Pure.

The newest `keep` stay, and the best by a metric. A damaged file counts for nothing: it does not take the place of a
whole one, and goes when enough whole ones are newer. So the only whole one is never removed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    global_step: int
    """Updates behind it."""
    is_intact: bool
    """Whether it can be gone on from."""
    score: float | None
    """How good it is, higher is better; None where that is not known."""


def score_of(metrics: Mapping[str, float | None], wanted: str | None) -> float | None:
    """Return how good a checkpoint is, higher is better; None where that is not known.

    Args:
        metrics: Its means over the test set.
        wanted: `keep_best` of the config: a name, `-name` where lower is better, or None.
    """
    if wanted is None:
        return None
    value = metrics.get(wanted.removeprefix("-"))
    if value is None or not math.isfinite(value):
        return None
    return -value if wanted.startswith("-") else value


def check_metric_name(wanted: str | None, measured: Mapping[str, float]) -> None:
    """Check that what `keep_best` names was measured.

    Raises:
        ConfigError: It was not.
    """
    if wanted is not None and wanted.removeprefix("-") not in measured:
        known = " or ".join(f"{sign}{name}" for name in measured for sign in ("", "-") if f"{sign}{name}" != "loss")
        raise ConfigError(
            f"keep_best is {wanted!r}, and no such metric is measured on the test set. "
            + (f"Expected {known}; - where lower is better." if known else "It needs a test set: data returned None.")
        )


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the best whole checkpoint, the oldest of equals; None where no score is known."""
    scored = [(each.score, -each.global_step, each) for each in saved if each.is_intact and each.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def choose_checkpoints_to_remove(saved: Sequence[SavedCheckpoint], keep: int, written: int) -> list[SavedCheckpoint]:
    """Return the checkpoints that are too old to stay.

    Args:
        saved: All of a run.
        keep: How many of the newest stay, at least 1; the best stays besides.
        written: Updates behind the one just written. Those with more are of before the run was taken back to an earlier
            one, perhaps because they are damaged in a tensor, which nobody has looked at here: they do not count, and
            are written over when the run comes to them.
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
