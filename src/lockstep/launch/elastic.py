"""The options with which a launch replaces workers, or ends silent ones."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lockstep.launch.membership import RespawnLimit

USUAL_RESPAWNS: Final = 3
"""How often a lost worker is replaced where no number is given: `respawn: true`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a launch keeps up the number of its workers.

        ls.launch(main, workers=4, elastic=ls.Elastic(respawn=3, spares=1))

    It applies where the workers can continue with others: every trainer has `on_worker_loss="continue"`, and the
    function calls `Trainer.join()`, which does nothing in the workers that the launch begins with.
    """

    respawn: int | None = None
    """How often a lost worker is replaced, at most, in `respawn_minutes`; None for never. A worker that failed by an
    exception never is. A loading process that is killed counts as a worker; with None they are started anew three
    times, and with 0 never."""
    respawn_minutes: float = 10.0
    """The time in which replacements are counted, in minutes."""
    spares: int = 0
    """How many more workers wait, with everything imported and built, to replace a lost one."""
    evict_after: float | None = None
    """Kill a worker that hangs for so many seconds; the others continue without it. None to wait on. It hangs if its
    process does not answer the launcher (it is stopped, or native code holds Python's lock), or if another worker waits
    all that time while this one completes no call of the trainer. So choose more than the longest step, data loading,
    or save takes on one worker."""
    folder: str | Path | None = None
    """A folder of this user in which `lockstep scale FOLDER` finds the launch; None for none."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: One is out of range.
        """
        for name, value in (("respawn", self.respawn or 0), ("spares", self.spares)):
            if value < 0:
                raise ValueError(f"{name} is {value}, expected 0 or more. (LS123)")
        if self.respawn_minutes <= 0:
            raise ValueError(f"respawn_minutes is {self.respawn_minutes}, expected more than 0. (LS123)")
        if self.evict_after is not None and self.evict_after <= 0:
            raise ValueError(f"evict_after is {self.evict_after}, expected more than 0 seconds, or None. (LS123)")

    @property
    def limit(self) -> RespawnLimit:
        """How often lost workers are replaced."""
        return RespawnLimit(count=self.respawn or 0, seconds=60 * self.respawn_minutes)

    @property
    def loading_limit(self) -> RespawnLimit:
        """How often killed loading processes are started anew: also where nothing is said of workers."""
        return self.limit if self.respawn is not None else replace(self.limit, count=USUAL_RESPAWNS)


FIXED = Elastic()
"""No worker is replaced or ended."""
