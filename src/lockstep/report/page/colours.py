"""Colours of the page, readable on white and on black."""

from typing import Final

RUN_COLOURS: Final = ("#4c78c8", "#e08a3c", "#4aa57a", "#b565b0", "#c8553d", "#3ea6b8", "#a58f2d", "#7b7fd4")
"""One for each run, or each curve of one run."""
SHARE_COLOURS: Final = {
    "loading": "#e08a3c",
    "compute": "#4c78c8",
    "gradients": "#b565b0",
    "others": "#c8553d",
    "update": "#4aa57a",
    "evaluating": "#3ea6b8",
    "saving": "#a58f2d",
    "rest": "#98a2ad",
}
"""Of each part of the time."""
AXIS_COLOUR: Final = "#87919c"
"""Of axes and labels."""
