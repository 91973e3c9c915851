"""Which checkpoints of a run are kept. Pure.

The newest `keep` checkpoints are kept, and the best one by a metric. A damaged file does not count as one of them.
It is removed when `keep` intact ones are newer. So the only intact checkpoint is never removed.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.engine.metric_names import mode_of_name
from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    global_step: int
    """Number of updates before it was written."""
    is_intact: bool
    """Whether its header is intact and its length right."""
    score: float | None
    """Its score, higher is better; None if it is not known."""


def score_of(metrics: Mapping[str, float | None], wanted: str | None) -> float | None:
    """Return the score of a checkpoint, higher is better; None if it is not known. `wanted` is as `keep_best`."""
    if wanted is None:
        return None
    value = metrics.get(wanted.removeprefix("-"))
    if value is None or not math.isfinite(value):
        return None
    return -value if wanted.startswith("-") else value


def check_metric_name(wanted: str | None, measured: Mapping[str, float]) -> None:
    """Check that the metric of `keep_best` was measured, and that not the worst checkpoint would be kept."""
    if wanted is None:
        return
    name = wanted.removeprefix("-")
    if name not in measured:
        near = difflib.get_close_matches(name, [*measured], n=1)
        guess = f"Did you mean {_with_sign(near[0], wanted)}? " if near else ""
        raise ConfigError(
            f"keep_best is {wanted!r}, but no such metric is measured on the test set. "
            + (
                f"{guess}Expected {' or '.join(each for name in measured for each in _ways(name))}; - means that lower "
                "is better."
                if measured
                else "It needs a test set: data returned None."
            )
            + " (LS808)"
        )
    if wanted not in _ways(name):
        other, better = ("highest", "lower") if wanted == name else ("lowest", "higher")
        raise ConfigError(
            f"keep_best is {wanted!r}, which would keep the {other} {name}. Write {_ways(name)[0]!r}, because {better} "
            "is better. (LS808)"
        )


def _ways(name: str) -> list[str]:
    """Return a metric as `keep_best` may name it: with the sign that its name implies, or both."""
    return {"min": [f"-{name}"], "max": [name], None: [name, f"-{name}"]}[mode_of_name(name)]


def _with_sign(name: str, wanted: str) -> str:
    given = f"-{name}" if wanted.startswith("-") else name
    return given if given in _ways(name) else _ways(name)[0]


def find_best(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the best intact checkpoint, the oldest if scores are equal; None if no score is known."""
    scored = [(each.score, -each.global_step, each) for each in saved if each.is_intact and each.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def choose_checkpoints_to_remove(saved: Sequence[SavedCheckpoint], keep: int, written: int) -> list[SavedCheckpoint]:
    """Return the checkpoints to remove, after the one with `written` updates was saved.

    Those with more updates are left: the run was resumed before them, and overwrites them when it is there again.
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
