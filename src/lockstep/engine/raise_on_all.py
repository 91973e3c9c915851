"""What every worker does for itself, with an error on all workers if it fails on one."""

from collections.abc import Callable
from typing import TypeVar

from lockstep.comm import World, calls_for
from lockstep.errors import PeerFailedError

Result = TypeVar("Result")


def gather_results(world: World, compute: Callable[[], Result], purpose: str) -> list[Result]:
    """Return what `compute` returns on every worker, in rank order: small, picklable values (collective).

    If it raises on one worker, all others raise `PeerFailedError`, so no worker waits for one that has failed.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = compute()
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know of it
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        with calls_for(purpose):
            found: list[tuple[Result, str | None]] = world.gather_objects((result, said))
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback refers to this frame: a cycle that would keep all that the callers hold
    for rank, (_, other) in enumerate(found):
        if other is not None:
            raise PeerFailedError(f"Rank {rank} has failed in {purpose}: {other} (LS213)")
    return [value for value, _ in found]
