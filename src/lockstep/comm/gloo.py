"""Connecting Gloo within what is left of the set-up's time.

Gloo has one timeout, for connecting and for every later message, so it cannot be given what is left: messages would
time out early ever after. It may take the whole limit once more. Where much of the limit is used already, ranks are
therefore connected twice, first with what is left: the second connection is between ranks that have just answered.
"""

import math
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.deadline import Deadline
from lockstep.comm.gloo_sockets import GlooSockets
from lockstep.comm.hosts import FindLost, GroupMembers, find_none_lost, read_all, store_loss_explained, wait_for_members
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.torch_private.groups import gloo_announcements

_NEGLIGIBLE_SECONDS: Final = 1.0
_NEGLIGIBLE_SHARE: Final = 0.05
"""How much of the limit the steps before may use without the ranks being connected twice."""
_LEAST_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1
"""How often a rank that is being connected looks whether another one was lost."""
_END_SECONDS: Final = 2.0
"""How long connecting may go on after a rank was lost, and how long after its end a loss is looked for: the kernel
closes the connections of a process before it reports its end, and a rank that is connected already may have left."""


@contextmanager
def gloo_connected_in_time(store: Store, rank: int, members: GroupMembers, deadline: Deadline) -> Iterator[None]:
    """Connect the ranks by Gloo before `deadline`, if much of the time is used, until the block ends (collective)."""
    negligible = max(_NEGLIGIBLE_SECONDS, _NEGLIGIBLE_SHARE * deadline.limit.total_seconds())
    is_late = deadline.used_seconds > negligible
    world_size = len(members.names)
    if world_size == 1 or not _is_any_late(store, rank, members, deadline, is_late=is_late):
        yield
        return
    try:
        # Held until the group is made: a rank that is done early would cut the connections of the others.
        place = PrefixStore("gloo/in_time", store)
        limit = deadline.left(_LEAST_SECONDS)
        connection = _connect(
            world_size, lambda: dist.ProcessGroupGloo(place, rank, world_size, limit), members.find_lost
        )
    except GroupError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"Gloo could not connect rank {members.names[rank]} to the other workers within the "
            f"{deadline.limit.total_seconds():g} s that the set-up may take. All had reached the rendezvous, so one "
            "was lost since, or is stuck, or a firewall is in between; look at the logs of the others. Gloo said: "
            f"{str(error).splitlines()[0]} (LS113)"
        ) from error
    try:
        yield
    finally:
        del connection


def connect_gloo(
    store: Store, size: int, make: Callable[[], Any], find_lost: FindLost = find_none_lost
) -> tuple[Any, GlooSockets]:
    """Make a Gloo backend on `store`, which is for it alone (collective over its ranks); return its connections too."""
    backend = _connect(size, make, find_lost)
    return backend, GlooSockets(backend, gloo_announcements(store, size))


def _connect(size: int, make: Callable[[], Any], find_lost: FindLost) -> Any:
    """Return what `make` makes, unless a rank is lost meanwhile, or the launcher announces that one was."""
    # Gloo waits for the connection of a lost rank until its timeout, and nothing ends that wait.
    return _ConnectionAttempt(make).result(find_lost) if size > 1 else make()


@final
class _ConnectionAttempt:
    """The making of a backend, in a thread that is left alone if the group is given up."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._make = make

    def result(self, find_lost: FindLost) -> Any:
        """Return what was made, or raise what making it raised, or that the group was given up or a rank is lost."""
        start_thread_left_alone(self._run, name="lockstep-gloo")
        OPEN_GROUPS.add(self)
        failure: RuntimeError | None = None
        lost: PeerLostError | None = None
        until = math.inf
        while time.monotonic() < until and not (lost is not None and failure is not None):
            try:
                made, error = self._outcome.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                lost = lost or find_lost()
                if lost is not None:
                    until = min(until, time.monotonic() + _END_SECONDS)
                continue
            if error is None:
                return made
            if isinstance(error, GroupError) or not isinstance(error, RuntimeError):
                raise error
            failure, until = error, time.monotonic() + _END_SECONDS
        raise (lost or failure or GroupError("The ranks could not be connected. (LS113)")) from failure

    def end_calls(self, error: GroupError) -> None:
        """Give the group up (local, any thread)."""
        self._outcome.put((None, error))

    def _run(self) -> None:
        try:
            self._outcome.put((self._make(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
            self._outcome.put((None, error))


def _is_any_late(store: Store, rank: int, members: GroupMembers, deadline: Deadline, *, is_late: bool) -> bool:
    """Return whether any rank has waited long; each has its own deadline, and all must do the same (collective)."""
    keys = [f"gloo/is_late/{peer}" for peer in range(len(members.names))]
    with store_loss_explained():
        store.set(keys[rank], str(is_late))
        wait_for_members(store, keys, members, deadline.with_at_least(_LEAST_SECONDS))
        return str(True).encode() in read_all(store, keys)
