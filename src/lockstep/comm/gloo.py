"""Connecting Gloo within what is left of the set-up's time.

Gloo has one timeout, for connecting and for every later message, so it cannot be given what is left: messages would
time out early ever after. It may take the whole limit once more. Where much of the limit is used already, ranks are
therefore connected twice, first with what is left: the second connection is between ranks that have just answered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lockstep.comm.deadline import Deadline
from lockstep.comm.hosts import GroupMembers, store_loss_explained, wait_for_members
from lockstep.errors import GroupError

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
        connection = dist.ProcessGroupGloo(
            PrefixStore("gloo/in_time", store), rank, world_size, deadline.left(_LEAST_SECONDS)
        )
    except RuntimeError as error:
        raise GroupError(
            f"Gloo could not connect rank {members.names[rank]} to the other workers within the "
            f"{deadline.limit.total_seconds():g} s that the set-up may take. All had reached the rendezvous, so one "
            "was lost since, or is stuck, or a firewall is in between; look at the logs of the others. Gloo said: "
            f"{str(error).splitlines()[0]}"
        ) from error
    try:
        yield
    finally:
        del connection


def _is_any_late(store: Store, rank: int, members: GroupMembers, deadline: Deadline, *, is_late: bool) -> bool:
    """Return whether any rank has waited long; each has its own deadline, and all must do the same (collective)."""
    keys = [f"gloo/is_late/{peer}" for peer in range(len(members.names))]
    with store_loss_explained():
        store.set(keys[rank], str(is_late))
        wait_for_members(store, keys, members, deadline.with_at_least(_LEAST_SECONDS))
        return any(store.get(key) == str(True).encode() for key in keys)
