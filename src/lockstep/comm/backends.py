"""The backends that Lockstep adds to torch.distributed: "shm", and "checked", which `check=True` asks for."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist

from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.checked import CheckedProcessGroup, check_group
from lockstep.comm.deadline import Deadline
from lockstep.comm.exit_notice import report_uncaught_exceptions
from lockstep.comm.hosts import GroupMembers, GroupSetUp, current_set_up, known_hosts, remember_hosts
from lockstep.comm.shm.group import ShmProcessGroup
from lockstep.comm.shm.rendezvous import NotShared
from lockstep.comm.shm.set_up import make_shm_group
from lockstep.errors import PeerLostError
from lockstep.torch_private import default_group


def register_backends() -> None:
    """Make torch.distributed know them; doing so again changes nothing (local)."""
    if not dist.is_available():
        return
    if not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
    if not hasattr(dist.Backend, "CHECKED"):
        dist.Backend.register_backend("checked", _make_checked, extended_api=True, devices=["cpu", "cuda"])


def _make_shm(options: Any, _: Any = None) -> ShmProcessGroup | CheckedProcessGroup:
    """Make the group that torch asks for (collective over its ranks)."""
    report_uncaught_exceptions()
    members = _read_members(options)
    set_up = _read_set_up(options, members)
    group: ShmProcessGroup | CheckedProcessGroup
    found, hosts = make_shm_group(options.store, options.group_rank, options.timeout, members, set_up)
    if isinstance(found, NotShared):
        if options.group_rank == 0:
            warnings.warn(
                f"The shm backend uses Gloo for this group, because {found.reason}. Calls are compared all the same.",
                stacklevel=2,
            )
        known = GroupSetUp(hosts=hosts, deadline=set_up.deadline)
        group = check_group(options.store, options.group_rank, options.timeout, {"cpu": "gloo"}, members, known)
    else:
        group = found
    remember_hosts(group, hosts)
    return group


def _make_checked(options: Any, backends: Mapping[str, str] | None = None) -> CheckedProcessGroup:
    """Make the group that torch asks for (collective over its ranks).

    `backends` is what `init_process_group` gave as options: a backend for each device. A subgroup gets none, for
    `new_group` passes the name of the default group's backend but not its options.
    """
    report_uncaught_exceptions()
    if backends is None:
        default: Any = default_group()
        backends = default.backend_names
    members = _read_members(options)
    set_up = _read_set_up(options, members)
    group = check_group(options.store, options.group_rank, options.timeout, backends, members, set_up)
    if set_up.hosts is not None:
        remember_hosts(group, set_up.hosts)
    return group


def _read_set_up(options: Any, members: GroupMembers) -> GroupSetUp:
    """Return what is known of the group that torch asks for: of a subgroup, what the default group knows (local)."""
    known = current_set_up()
    if known is not None:
        return known
    default = dist.GroupMember.WORLD
    hosts = None if default is None else known_hosts(default)
    return GroupSetUp(
        hosts=None if hosts is None else hosts.of_ranks(members.names), deadline=Deadline.after(options.timeout)
    )


def _read_members(options: Any) -> GroupMembers:
    """Return who the ranks of the group are that torch asks for (local)."""
    names = tuple(options.global_ranks_in_group or range(options.group_size))  # torch lists none for the default group

    def find_lost() -> PeerLostError | None:
        default = dist.GroupMember.WORLD
        if default is None or not capabilities_of(default).reports_exits:
            return None
        return cast("ReportsExits", default).find_lost(names)

    return GroupMembers(names=names, find_lost=find_lost)
