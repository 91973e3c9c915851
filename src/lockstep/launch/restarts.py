"""Starting workers again: `Elastic`, the options with which lost ones are replaced, and restarts of all of them.

What they compute again is theirs to find out.

    what has happened                         the workers are started again
    -----------------                         -----------------------------
    some were killed before the first step    where `StartAgain` is given: replaced as often as `respawn` allows, else
                                              without those that are lost
    so many were killed that the others       where it is given, and `respawn` allows it: from the newest checkpoint
    cannot continue: all of them, as a rule
    one has failed in another way             as often as `max_restarts` says, from the beginning

A script or a function that looks for its newest checkpoint continues there. A request to stop is never answered by a
restart.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar, final

from lockstep.devices import Placement
from lockstep.errors import WorkerFailedError, counted
from lockstep.launch.membership import RespawnLimit

Attempt = TypeVar("Attempt")
Result = TypeVar("Result")
Tell = Callable[[str], None]
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
    or save takes on one worker. The second is not found out of a process with more than 100 threads of Python."""
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


class LostWorkersError(WorkerFailedError):
    """Workers were ended by a signal, and the others could not continue; none has failed by its own code.

    `error` is that for the caller; `lost` are numbers of workers, which are their places in the placement where the
    training has not begun.
    """

    def __init__(self, error: WorkerFailedError, lost: frozenset[int], described: str, *, has_begun: bool) -> None:
        super().__init__(str(error), error.failures)
        self.error = error
        self.lost = lost
        self.described = described
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True, kw_only=True)
class CallToStart:
    placement: Placement
    call: bytes


@final
@dataclass(slots=True, kw_only=True)
class StartAgain:
    """What is started after a loss, where that is not left to `max_restarts`."""

    min_workers: int
    is_unchanged: Callable[[], bool]
    """Returns whether no worker has begun to train: nothing was written."""
    resume: Callable[[], tuple[str, bytes]]
    """Returns the newest checkpoint in words, and the call that goes on from it."""
    tell: Tell
    _replaced_at: list[float] = field(default_factory=list)

    def after(self, limit: RespawnLimit, lost: LostWorkersError, attempt: CallToStart) -> CallToStart | None:
        """Decide what is started, and tell of it; None if the loss is an error."""
        devices, is_replaced = attempt.placement.devices, limit.take(self._replaced_at, time.monotonic())
        if not lost.has_begun and self.is_unchanged():
            if not is_replaced:
                devices = tuple(device for number, device in enumerate(devices) if number not in lost.lost)
                if len(devices) < max(self.min_workers, 1):
                    return None
            count = counted(len(devices), "worker")
            self.tell(f"{lost.described}, before the training began. It starts again with {count}. Nothing is lost.")
            return replace(attempt, placement=replace(attempt.placement, devices=devices))
        if not is_replaced:
            return None
        checkpoint, call = self.resume()
        self.tell(
            f"{lost.described}, so the others cannot continue. The run goes on from {checkpoint} with "
            f"{counted(len(devices), 'worker')}: the steps after it are taken again, with the same bits. (LS604)"
        )
        return replace(attempt, call=call)


def call_with_restarts(
    start: Callable[[Attempt], Result],
    first: Attempt,
    *,
    most: int,
    tell: Tell,
    may_restart: Callable[[], bool] = lambda: True,
    after_loss: Callable[[LostWorkersError, Attempt], Attempt | None] | None = None,
) -> Result:
    """Return what `start` returns; start again after a failure, as the table above says: `first` `most` times."""
    attempt = first
    reasons: list[str] = []
    while True:
        following: Attempt | None = None
        try:
            return start(attempt)
        except LostWorkersError as lost:
            if after_loss is not None and may_restart():
                following = after_loss(lost, attempt)
            failure = lost.error
        except WorkerFailedError as error:
            failure = error
        if following is None:
            if len(reasons) == most or not may_restart():
                if not reasons:
                    raise failure from failure.__cause__
                times, before = counted(len(reasons), "time"), "".join(f"\n  {reason}" for reason in reasons)
                message = f"{failure}\n\nAll workers were started again {times}, because before:{before}"
                raise WorkerFailedError(message, failure.failures) from failure.__cause__
            reasons.append(str(failure).splitlines()[0].removeprefix("error: "))
            tell(f"Starting all workers again (restart {len(reasons)} of at most {most}). {reasons[-1]}")
            following = first
        attempt = following
