"""Starting all workers of a launch again after some have failed. What they compute again is theirs to find out.

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
from dataclasses import dataclass, replace
from typing import TypeVar, final

from lockstep.devices import Placement
from lockstep.errors import WorkerFailedError, counted
from lockstep.launch.membership import RespawnLimit, may_respawn

Result = TypeVar("Result")
Tell = Callable[[str], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    min_workers: int
    """With fewer the launch fails."""
    is_unchanged: Callable[[], bool]
    """Returns whether no worker has begun to train: nothing was written."""
    resume: Callable[[], tuple[str, bytes]]
    """Returns the newest checkpoint in words, and the call that goes on from it."""
    tell: Tell


@final
class Restarts:
    """Counts the restarts of a launch, and tells of each."""

    def __init__(self, most: int, tell: Tell) -> None:
        if most < 0:
            raise ValueError(f"max_restarts is {most}, expected 0 or more. (LS123)")
        self.reasons: list[str] = []
        self._most = most
        self._tell = tell

    def begin_another(self, message: str, before: str = "") -> bool:
        """Count a restart after a failure, and tell of it, after the text `before`; return False if it is too many."""
        if len(self.reasons) == self._most:
            return False
        self.reasons.append(message.splitlines()[0].removeprefix("error: "))
        number = f"restart {len(self.reasons)} of at most {self._most}"
        self._tell(f"{before}Starting all workers again ({number}). {self.reasons[-1]}")
        return True

    def describe(self) -> str:
        """Return why there were restarts, to follow the last failure; empty if there was none."""
        if not self.reasons:
            return ""
        lines = "".join(f"\n  {reason}" for reason in self.reasons)
        return f"\n\nAll workers were started again {counted(len(self.reasons), 'time')}, because before:{lines}"


def call_with_restarts(
    start: Callable[[CallToStart], Result],
    first: CallToStart,
    restarts: Restarts,
    may_restart: Callable[[], bool],
    limit: RespawnLimit,
    again: StartAgain | None = None,
) -> Result:
    """Return what `start` returns; start again after a failure, as the table above says."""
    attempt, replaced_at = first, list[float]()
    while True:
        following: CallToStart | None = None
        try:
            return start(attempt)
        except LostWorkersError as lost:
            if again is not None and may_restart():
                following = _after_loss(lost, attempt, again, limit, replaced_at)
            failure = lost.error
        except WorkerFailedError as error:
            failure = error
        if following is None:
            if not may_restart() or not restarts.begin_another(str(failure)):
                if restarts.reasons:
                    raise WorkerFailedError(f"{failure}{restarts.describe()}", failure.failures) from failure.__cause__
                raise failure from failure.__cause__
            following = first
        attempt = following


def _after_loss(
    lost: LostWorkersError, attempt: CallToStart, again: StartAgain, limit: RespawnLimit, replaced_at: list[float]
) -> CallToStart | None:
    """Return what is started after a loss, and tell of it; None if that is an error."""
    now, devices = time.monotonic(), attempt.placement.devices
    is_replaced = may_respawn(limit, replaced_at, now)
    if is_replaced:
        replaced_at.append(now)
    if not lost.has_begun and again.is_unchanged():
        if not is_replaced:
            devices = tuple(device for number, device in enumerate(devices) if number not in lost.lost)
            if len(devices) < max(again.min_workers, 1):
                return None
        count = counted(len(devices), "worker")
        again.tell(f"{lost.described}, before the training began. It starts again with {count}. Nothing is lost.")
        return replace(attempt, placement=replace(attempt.placement, devices=devices))
    if not is_replaced:
        return None
    checkpoint, call = again.resume()
    again.tell(
        f"{lost.described}, so the others cannot continue. The run goes on from {checkpoint} with "
        f"{counted(len(devices), 'worker')}: the steps after it are taken again, with the same bits. (LS604)"
    )
    return replace(attempt, call=call)
