"""What the name of a metric says: whether lower or higher values are better."""

import re
from typing import Literal

_LOWER_IS_BETTER = frozenset({"loss", "error", "perplexity", "mse", "mae", "rmse"})
_HIGHER_IS_BETTER = frozenset({
    "accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "score", "bleu", "r2", "map", "iou",
})  # fmt: skip
_TURNS_ROUND = frozenset({"neg", "negative", "minus"})
"""Words with which a name says the opposite: neg_log_loss."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
"""A word of a_name or AName."""


def conclude_mode(metric: str) -> Literal["min", "max"]:
    """Return whether lower ("min") or higher values of a metric are better, by the words of its name."""
    mode = mode_of_name(metric)
    if mode is None:
        raise ValueError(
            f"Whether a lower or a higher {metric} is better cannot be concluded from its name. Give mode: "
            "'min' or 'max'. (LS526)"
        )
    return mode


def mode_of_name(metric: str) -> Literal["min", "max"] | None:
    """Return whether lower ("min") or higher values of a metric are better; None if its name does not say it."""
    words = {word.lower() for word in [*_WORD.findall(metric), *_WORD.findall(metric.lower())]}  # mAP is a word, too
    if words & _TURNS_ROUND:
        return None
    if words & _LOWER_IS_BETTER:
        return "min"
    return "max" if words & _HIGHER_IS_BETTER else None
