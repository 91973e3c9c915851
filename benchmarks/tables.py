"""Markdown tables, with a mark for noisy figures."""

import os
import statistics
import sys
from collections.abc import Sequence

NOISY_SPREAD = 0.5
"""A figure is marked if its interquartile range, divided by the median, exceeds this."""


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range divided by the median."""
    if len(samples) < 2:  # noqa: PLR2004 - there are no quartiles
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else float("inf")


def mark(*samples: Sequence[float]) -> str:
    return "~" if any(spread(each) > NOISY_SPREAD for each in samples) else ""


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def load_average() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())
