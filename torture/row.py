"""What one part of the campaign has found."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """The counts of one part."""

    name: str
    until: float
    """When the part is to begin nothing new, on the monotonic clock."""
    num_tried: int = 0
    problems: list[str] = field(default_factory=list)
    """What went wrong, with what it takes to repeat it."""
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def has_time(self) -> bool:
        """Whether there is time for another try; the first one is always made."""
        return self.num_tried == 0 or time.monotonic() < self.until

    def note(self, problem: str = "") -> None:
        """Count one try, and what was wrong with it."""
        self.num_tried += 1
        if problem:
            self.problems.append(problem)
            print(f"    {self.name}: {problem}", flush=True)
