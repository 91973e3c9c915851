"""The position of a run in its data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """The next step to be taken."""

    epoch: int = 0
    """Epoch, counted from 0."""
    step: int = 0
    """Step within the epoch, counted from 0."""

    def advance(self, num_steps: int | None) -> "Cursor":
        """Return the cursor one step on, in an epoch of `num_steps` steps; None if it has more, but not how many."""
        if num_steps is None or self.step + 1 < num_steps:
            return Cursor(self.epoch, self.step + 1)
        return Cursor(self.epoch + 1, 0)
