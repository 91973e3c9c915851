"""The parts of a config that say how a run is trained besides model, data and optimizer. Needs no torch."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

ImportPath = Annotated[str, StringConstraints(strict=True, pattern=r"^[\w.]+:[\w.]+$")]
NamedObject = ImportPath | Annotated[dict[ImportPath, dict[str, Any]], Field(min_length=1, max_length=1)]
"""An import path, or one with arguments: `mine:Freeze`, or `{mine:Freeze: {until_epoch: 2}}`."""
TrackerName = Annotated[str, StringConstraints(strict=True, pattern=r"^(tensorboard|wandb|mlflow|[\w.]+:[\w.]+)$")]
NamedTracker = TrackerName | Annotated[dict[TrackerName, dict[str, Any]], Field(min_length=1, max_length=1)]
"""A tracker by its name or import path, alone or with options: `tensorboard`, or `{wandb: {mode: offline}}`."""
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class OptionGroup(BaseModel):
    """A key of a config that holds keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EarlyStoppingOptions(OptionGroup):
    """When the run ends before its last epoch."""

    metric: str = "loss"
    """A metric of an evaluation."""
    patience: int = Field(default=3, ge=1)
    """How many evaluations in a row without an improvement end the run."""
    min_delta: float = Field(default=0.0, ge=0)
    """By how much a value must be better."""
    mode: Literal["min", "max"] | None = None
    """Whether a lower value is better or a higher one; None to conclude it from the metric's name."""


class EMAOptions(OptionGroup):
    """The exponential moving average of the weights."""

    decay: float = Field(default=0.999, ge=0, lt=1)
    """How much of the average stays in each step."""


class SWAOptions(OptionGroup):
    """The mean of the weights at the ends of epochs."""

    start_epoch: int = Field(ge=0)
    """The first epoch, counted from 0, whose end is in the mean."""


def parse_seconds(text: str | float) -> float:
    """Return the seconds of a number, or of a text such as "90m", "1h30m" or "2d"; ValueError for anything else."""
    seconds: float = 0
    if isinstance(text, str):
        found = _TIME.fullmatch(text.replace(" ", ""))
        if found is not None:
            seconds = sum(int(number or 0) * unit for number, unit in zip(found.groups(), _UNITS.values(), strict=True))
    elif not isinstance(text, bool):
        seconds = float(text)
    if not seconds > 0:
        raise ValueError(f"max_time is {text!r}, expected seconds, or a time with units such as 90m, 1h30m or 2d")
    return seconds
