"""What has happened when a trainer continues with other workers, for messages and recorders."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.comm.generations import ChangedWorker, LostWorker
from lockstep.data import Cursor
from lockstep.errors import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """How a trainer continues with other workers."""

    generation: int
    """Number of the present generation of workers; the first is 0."""
    lost: tuple[LostWorker, ...]
    arrived: tuple[ChangedWorker, ...] = ()
    left: tuple[ChangedWorker, ...] = ()
    """Who has left, as it was asked to."""
    world_size: int
    shards: tuple[range, ...]
    """Which shards each of them runs, in rank order."""
    cursor: Cursor
    """The next step."""
    repeats_step: bool
    """Whether the step at `cursor` had begun; else it was an evaluation, a save or another call."""
    seconds: float
    """From the error of the call to the moment at which it could be made again."""

    def __str__(self) -> str:
        changes = [f"rank {each.rank} (pid {each.pid}) {each.reason}" for each in self.lost]
        changes += [f"rank {each.rank} (pid {each.pid}) left" for each in self.left]
        changes += [f"rank {each.rank} (pid {each.pid}) joined" for each in self.arrived]
        lost = "; ".join(changes) or "The workers are others"
        count = f"{counted(self.world_size, 'worker')} continue{'s' if self.world_size == 1 else ''}"
        place = f"epoch {self.cursor.epoch + 1}, step {self.cursor.step + 1}"
        how = f"with {place}, which is repeated" if self.repeats_step else f"before {place}"
        who = ", ".join(f"rank {rank}: {_name_range(shards)}" for rank, shards in enumerate(self.shards))
        return (
            f"{lost[0].upper()}{lost[1:]}. {count} {how}, after {self.seconds:.2f} s. Shards: {who}. No sample is "
            "lost, and no bit of the result changes. (LS604)"
        )


def _name_range(shards: Sequence[int]) -> str:
    return f"{shards[0]}" if len(shards) == 1 else f"{shards[0]} to {shards[-1]}"
