"""Which workers a run continues with: pure functions from the present workers and what became of them.

A *generation* is one set of workers. Each worker process has a number that no other process of the run ever gets; its
rank is its place in the generation, and may change from one generation to the next. The launcher alone decides: it
holds the process of every worker, so it knows which have ended. It kills a worker that does not answer *before* the
others continue without it, so two workers never have the same rank at the same time.

    generation 0     workers 0 1 2      ranks 0 1 2
    worker 0 ends
    generation 1     workers 1 2        ranks 0 1        rank 0 has the state of the run: those that stay come first
    worker 3 arrives
    generation 2     workers 1 2 3      ranks 0 1 2
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    number: int
    workers: tuple[int, ...]
    """Numbers of the worker processes, in rank order."""

    def rank_of(self, worker: int) -> int | None:
        return self.workers.index(worker) if worker in self.workers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    min_workers: int = 1
    """With fewer, the run stops."""
    max_workers: int
    """Its number of shards: every worker needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    lost: Collection[int] = ()
    leaving: Collection[int] = ()
    arrived: Sequence[int] = ()
    """New workers that are ready to take over the state of the run, in the order in which they became ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    reason: str


def next_generation(current: Generation, changes: Changes, limits: WorkerLimits) -> Generation | Stop:
    """Return the workers with which a run continues; the same generation if nothing changes for it."""
    gone = {*changes.lost, *changes.leaving}
    staying = tuple(worker for worker in current.workers if worker not in gone)
    if not staying:
        count = len(current.workers)
        who = "The only worker" if count == 1 else f"All {count} workers"
        return Stop(reason=f"{who} ended, so the state of the run is lost. Resume from its newest checkpoint.")
    new = [worker for worker in changes.arrived if worker not in gone and worker not in current.workers]
    workers = (*staying, *new[: max(0, limits.max_workers - len(staying))])
    if len(workers) < limits.min_workers:
        return Stop(
            reason=f"{len(workers)} of {len(current.workers)} workers {'is' if len(workers) == 1 else 'are'} left, and "
            f"min_workers is {limits.min_workers}. Resume with as many workers from the newest checkpoint, or lower "
            "min_workers."
        )
    if workers == current.workers:
        return current
    return Generation(number=current.number + 1, workers=workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a run is to become, where nobody was lost."""

    num_workers: int
    leaving: Collection[int] = ()
    arrived: Sequence[int] = ()


def planned_changes(current: Generation, wishes: Wishes, limits: WorkerLimits) -> Changes:
    """Return who leaves and who joins at the next step boundary; empty changes if nobody does.

    Who has asked to leave does, unless fewer than `min_workers` or nobody with the state of the run would be left.
    Where there are too many workers, the last ones leave. New workers join as far as there is room for them.
    """
    asked = [worker for worker in current.workers if worker in wishes.leaving]
    staying = [worker for worker in current.workers if worker not in asked]
    wanted = max(min(wishes.num_workers, limits.max_workers), limits.min_workers, 1)
    surplus, staying = staying[wanted:], staying[:wanted]
    new = [worker for worker in wishes.arrived if worker not in current.workers]
    arrived = new[: max(0, wanted - len(staying))]
    if asked and (not staying or len(staying) + len(arrived) < limits.min_workers):
        return planned_changes(current, replace(wishes, leaving=()), limits)
    return Changes(leaving=(*asked, *surplus), arrived=tuple(arrived))


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnLimit:
    count: int
    seconds: float

    def take(self, respawned_at: list[float], now: float) -> bool:
        """Return whether one more may be started, and count it."""
        is_left = sum(1 for moment in respawned_at if now - moment < self.seconds) < self.count
        if is_left:
            respawned_at.append(now)
        return is_left
