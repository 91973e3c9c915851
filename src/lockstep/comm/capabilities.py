"""What a process group can do beside torch's collectives, asked through one function and not by its class.

Groups of Lockstep's own backends have an attribute `capabilities`; of torch's own groups only the hosts may be known.
The protocols below say which methods a capability stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lockstep.comm.hosts import known_hosts
from lockstep.errors import PeerLostError
from lockstep.shards.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapabilities:
    """What a group can do."""

    owns_memory: bool = False
    """It hands out CPU tensors that it reduces without copying them; see `OwnsMemory`."""
    adds_in_order: bool = False
    """It adds CPU tensors in the order of the tree; see `AddsInOrder`."""
    is_host_local: bool = False
    """All its ranks are known to be on one host."""
    runs_in_callers_thread: bool = False
    """A blocking call is run by the thread that makes it, after those before it."""
    compares_calls: bool = False
    """Its ranks compare their calls before data is exchanged; see `ComparesCalls`."""
    reports_exits: bool = False
    """A rank can tell the others that it makes no more calls, and why; see `ReportsExits`."""


class OwnsMemory(Protocol):
    """A group that hands out tensors."""

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a tensor of zeros (local)."""


class AddsInOrder(Protocol):
    """A group that adds in the order of the tree."""

    def ordered_all_reduce(  # what is reduced, and what is compared
        self,
        parts: Sequence[Tensor],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
        *,
        is_async: bool,
    ) -> Work:
        """Sum subtrees of shards, several on each rank, into `out` on every rank (collective)."""


class ComparesCalls(Protocol):
    """A group that compares calls."""

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has come with the same call, which is not one of this group's own (collective)."""


class ReportsExits(Protocol):
    """A group whose ranks know of each other's end."""

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of `error` (local)."""

    def send_exit_notice(self) -> None:
        """Tell the other ranks that this one makes no more calls (local)."""

    def find_lost(self, peers: Sequence[int]) -> PeerLostError | None:
        """Return the error for one of `peers` that will make no call any more, if that is known (local)."""


def capabilities_of(group: ProcessGroup) -> GroupCapabilities:
    """Return what any group of torch can do (local)."""
    found = getattr(group, "capabilities", None)
    if isinstance(found, GroupCapabilities):
        return found
    hosts = known_hosts(group)
    return GroupCapabilities(is_host_local=hosts is not None and hosts.is_one_host)
