"""Starting all workers again where some are lost before the first step: then nothing is lost with them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from lockstep.devices import Placement
from lockstep.errors import WorkerFailedError, counted
from lockstep.launch.elastic import Elastic
from lockstep.launch.membership import may_respawn

Result = TypeVar("Result")


class LostAtStartError(WorkerFailedError):
    """Workers were ended by a signal before every worker could continue without others.

    `error` is that for the caller; `lost` are numbers of workers, which are their places in the placement.
    """

    def __init__(self, error: WorkerFailedError, lost: frozenset[int], described: str) -> None:
        super().__init__(str(error), error.failures)
        self.error = error
        self.lost = lost
        self.described = described


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    min_workers: int
    """With fewer the launch fails."""
    is_unchanged: Callable[[], bool]
    """Returns whether no worker has begun to train: nothing was written."""
    tell: Callable[[str], None]


def call_until_begun(
    call: Callable[[Placement], Result], placement: Placement, elastic: Elastic, again: StartAgain | None
) -> Result:
    """Return what `call` returns; where workers are lost at the start, call it again.

    They are replaced as often as `elastic` says; else the others start without them. None in `again`: never.
    """
    replaced_at: list[float] = []
    while True:
        try:
            return call(placement)
        except LostAtStartError as error:
            if again is None or not again.is_unchanged():
                raise error.error from error.error.__cause__
            lost = error
        now = time.monotonic()
        if may_respawn(elastic.limit, replaced_at, now):
            replaced_at.append(now)
        else:
            left = tuple(device for number, device in enumerate(placement.devices) if number not in lost.lost)
            if len(left) < max(again.min_workers, 1):
                raise lost.error from lost.error.__cause__
            placement = replace(placement, devices=left)
        count = counted(len(placement.devices), "worker")
        again.tell(f"{lost.described}, before the training began. It starts again with {count}. Nothing is lost.")
