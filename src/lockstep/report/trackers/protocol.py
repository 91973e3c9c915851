"""What a tracker does, and what it is told of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Ending = Literal["finished", "stopped", "failed"]
"""How a run has ended: at its end, on request, or with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run."""

    name: str
    """The name to show: that of the run directory."""
    key: str
    """Eight letters and digits; the same after each resume, another one for each run directory."""
    folder: Path
    """The run directory."""
    config: Mapping[str, Any]
    """The config of the run."""
    global_step: int
    """Updates that the run has; greater than 0 if it is resumed."""


class Tracker(Protocol):
    """Shows a run elsewhere. Only rank 0 has one; if it is lost, the next rank 0 makes one of its own.

    A tracker whose method raises during the training is left out from then on, with a warning; the next resume brings
    it up to date.
    """

    def start(self, run: TrackedRun) -> int:
        """Open the run, the same one as before a resume, and leave nothing in it after update `run.global_step`.

        Returns:
            Up to which update the run holds everything. What is later follows by `log`; 0 for an empty run.
        """

    def log(self, global_step: int, values: Mapping[str, float]) -> None:
        """Take numbers of an update (local).

        Args:
            global_step: Updates since the run began.
            values: Finite numbers by name: `step/loss`, `epoch/test_accuracy`.
        """

    def end(self, ending: Ending) -> None:
        """Write what is not written yet, and close the run."""
