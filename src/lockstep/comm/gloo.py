"""Connecting Gloo within what is left of the set-up's time.

Gloo has one timeout, for connecting and for every later message, so it cannot be given what is left: messages would
time out early ever after. It may take the whole limit once more. Where much of the limit is used already, ranks are
therefore connected twice, first with what is left: the second connection is between ranks that have just answered.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.bootstrap.channel_store import launch_store
from lockstep.comm.deadline import Deadline
from lockstep.comm.gloo_sockets import GlooSockets
from lockstep.comm.hosts import GroupMembers, read_all, store_loss_explained, wait_for_members
from lockstep.comm.open_groups import OPEN_GROUPS
from lockstep.errors import GroupError
from lockstep.torch_private import gloo_announcements

_NEGLIGIBLE_SECONDS: Final = 1.0
_NEGLIGIBLE_SHARE: Final = 0.05
"""How much of the limit the steps before may use without the ranks being connected twice."""
_LEAST_SECONDS: Final = 1.0


@contextmanager
def gloo_connected_in_time(store: Store, rank: int, members: GroupMembers, deadline: Deadline) -> Iterator[None]:
    """Connect the ranks by Gloo before `deadline`, if much of the time is used, and until the block ends (collective).

    Raises:
        GroupError: They cannot be connected within that time.
    """
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
        connection = _connect(store, world_size, lambda: dist.ProcessGroupGloo(place, rank, world_size, limit))
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


def connect_gloo(store: Store, size: int, make: Callable[[], Any]) -> tuple[Any, GlooSockets]:
    """Make a Gloo backend (collective over its ranks); return its connections too.

    Args:
        store: The store that `make` gives Gloo, for this alone.
        size: How many ranks there are.
        make: Makes it, with this store.

    Raises:
        GroupError: The launcher has announced that a rank was lost meanwhile.
        RuntimeError: They cannot be connected.
    """
    backend = _connect(store, size, make)
    return backend, GlooSockets(backend, gloo_announcements(store, size))


def _connect(store: Store, size: int, make: Callable[[], Any]) -> Any:
    """Return what `make` makes, unless the launcher announces that a rank was lost meanwhile."""
    # Gloo waits for the connection of a lost rank until its timeout, and nothing ends that wait.
    return _ConnectionAttempt(make).result() if size > 1 and launch_store(store) is not None else make()


@final
class _ConnectionAttempt:
    """The making of a backend, in a thread that is left alone if the group is given up."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._make = make

    def result(self) -> Any:
        """Return what was made.

        Raises:
            BaseException: What making it has raised.
            GroupError: The group was given up.
        """
        threading.Thread(target=self._run, name="lockstep-gloo", daemon=True).start()
        OPEN_GROUPS.add(self)
        made, error = self._outcome.get()
        if error is not None:
            raise error
        return made

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
