"""What a process group can do beside torch's collectives: read by one function, and not from its class.

Groups of Lockstep's own backends have an attribute `capabilities`; of torch's own groups only the hosts may be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch.distributed import ProcessGroup

from lockstep.comm.hosts import known_hosts
from lockstep.errors import PeerLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapabilities:
    owns_memory: bool = False
    """It allocates CPU tensors that it reduces without copying them (`allocate_tensor`)."""
    adds_in_order: bool = False
    """It adds CPU tensors in the order of the tree: its `ordered_all_reduce`."""
    is_host_local: bool = False
    """All its ranks are known to be on one host."""
    runs_in_callers_thread: bool = False
    """A blocking call is run by the thread that makes it, after those before it."""
    compares_calls: bool = False
    """Its ranks compare their calls before data is exchanged; `compare_calls` compares one that is not its own."""
    reports_exits: bool = False
    """A rank can report to the others that it makes no more calls, and why; see `ReportsExits`."""


class ReportsExits(Protocol):
    def raise_if_broken(self) -> None:
        """Raise the error of a group that cannot be used any more (local)."""

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one exits because of `error` (local)."""

    def send_exit_notice(self) -> None:
        """Report to the other ranks that this one makes no more calls (local)."""

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no more calls, if that is known (local)."""


def raise_if_broken(group: ProcessGroup | None) -> None:
    """Raise if a rank was lost while a device was in a call of the group (local).

    To be called after every read of what a call wrote on a device, and before the value is used: a call that was ended
    because a rank was lost leaves any value. Groups of torch's own, without checks, raise nothing here.
    """
    if group is not None and capabilities_of(group).reports_exits:
        cast("ReportsExits", group).raise_if_broken()


def capabilities_of(group: ProcessGroup) -> GroupCapabilities:
    found = getattr(group, "capabilities", None)
    if isinstance(found, GroupCapabilities):
        return found
    hosts = known_hosts(group)
    return GroupCapabilities(is_host_local=hosts is not None and hosts.is_one_host)
