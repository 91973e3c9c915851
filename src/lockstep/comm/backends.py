"""The backends that Lockstep adds to torch.distributed: "shm", and "checked" for groups of torch that compare calls."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

from lockstep.comm.calls import describe_call
from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.gloo import GlooComparer
from lockstep.comm.group import CheckedProcessGroup, Comparer, LockstepGroup
from lockstep.comm.hosts import (
    Checking,
    GroupBackends,
    GroupMembers,
    GroupSetUp,
    current_set_up,
    known_hosts,
    remember_hosts,
    say_not_shared,
)
from lockstep.comm.lost_ranks import report_uncaught_exceptions
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.shm.group import (
    make_shared_memory_comparer,
    make_shm_group,
)
from lockstep.comm.shm.rendezvous import NotShared
from lockstep.comm.stored_values import Deadline
from lockstep.comm.torch_backends import TorchBackends
from lockstep.errors import PeerLostError
from lockstep.torch_private.groups import (
    GroupRequest,
    intercept_group_making,
    intercept_timeouts,
    leave_recording_to,
)


def register_backends() -> None:
    """Register them with torch.distributed; doing so again changes nothing (local)."""
    if not dist.is_available() or hasattr(dist.Backend, "SHM"):
        return
    dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("checked", _make, extended_api=True, devices=["cpu", "cuda"])
    for name in ("shm", "checked"):
        leave_recording_to(name)  # they have a recorder of their own
    intercept_group_making(_make_group)
    intercept_timeouts(_set_timeout)


def _make_group(request: GroupRequest) -> Any:
    """Make the group that torch requests; every rank of the default group must request the same (collective)."""
    default: Any = dist.GroupMember.WORLD
    names = dist.BackendConfig(dist.Backend(request.backend)).get_device_backend_map()
    set_up = None if request.ranks else current_set_up()
    if request.ranks and request.name.isdecimal() and capabilities_of(default).compares_calls:
        # Ranks that make different groups, or another call, would wait for each other until the timeout.
        detail = f"ranks {list(request.ranks)}, {request.backend}, group number {request.name}"
        default.compare_calls(describe_call("new_group", (), detail))
    if request.ranks:
        checking = _checking_of_subgroup(default, names)
    else:
        checking = Checking.OFF if set_up is None else set_up.checking
    subgroups = Checking.OFF if set_up is None else set_up.subgroups
    asked = GroupBackends(names=names, checking=checking, subgroups=subgroups)
    if names.get("cpu") == "shm":
        return request.make("shm", asked)
    return request.make() if checking is Checking.OFF else request.make("checked", asked)


def _checking_of_subgroup(default: Any, names: Mapping[str, str]) -> Checking:
    """A group of some ranks of the default group does as that one does."""
    if not isinstance(default, LockstepGroup):
        return Checking.OFF
    kinds, asked = set(names.values()), default.asked
    if asked.names.get("cpu") == "shm":
        return asked.subgroups if asked.checking.compares or kinds == {"gloo"} else Checking.OFF
    return asked.checking if kinds <= {"gloo", *asked.names.values()} else Checking.OFF


def _set_timeout(group: ProcessGroup, timeout: timedelta) -> bool:
    if not isinstance(group, LockstepGroup):
        return False
    group.set_timeout(timeout)
    return True


def _make(options: Any, asked: Any = None) -> LockstepGroup:
    """Make the group that torch requests (collective over its ranks)."""
    report_uncaught_exceptions()
    members = _read_members(options)
    set_up = _read_set_up(options, members)
    backends = asked if isinstance(asked, GroupBackends) else GroupBackends(names={"cpu": "shm"})
    hosts = set_up.hosts
    group: LockstepGroup | NotShared | None = None
    if backends.names.get("cpu") == "shm":
        group, hosts = make_shm_group(options.store, options.group_rank, options.timeout, members, set_up, backends)
    if isinstance(group, NotShared):
        default = dist.GroupMember.WORLD
        is_said = default is not None and "shm" in dist.get_backend_config(default)  # when that group was made
        if options.group_rank == 0 and len(members.global_ranks) > 1 and not is_said:
            say_not_shared(group.reason)
        backends = GroupBackends(names={"cpu": "gloo", **backends.of_torch}, checking=Checking.WAIT)
        set_up = GroupSetUp(hosts=hosts, deadline=set_up.deadline)
    if not isinstance(group, LockstepGroup):
        group = _check_group(options, backends, members, set_up)
    if hosts is not None:
        remember_hosts(group, hosts)
    OPEN_GROUPS.add(group)
    return group


def _read_set_up(options: Any, members: GroupMembers) -> GroupSetUp:
    """Return what is known of the group that torch requests: of a subgroup, from the default group (local)."""
    known = current_set_up()
    if known is not None:
        return known
    default = dist.GroupMember.WORLD
    hosts = None if default is None else known_hosts(default)
    return GroupSetUp(
        hosts=None if hosts is None else hosts.of_ranks(members.global_ranks), deadline=Deadline.after(options.timeout)
    )


def _read_members(options: Any) -> GroupMembers:
    global_ranks = tuple(
        options.global_ranks_in_group or range(options.group_size)
    )  # torch lists none for the default group

    def find_lost() -> PeerLostError | None:
        default = dist.GroupMember.WORLD
        if default is None or not capabilities_of(default).reports_exits:
            return None
        return cast("ReportsExits", default).find_lost(global_ranks)

    return GroupMembers(global_ranks=global_ranks, find_lost=find_lost)


def _check_group(options: Any, asked: GroupBackends, members: GroupMembers, set_up: GroupSetUp) -> CheckedProcessGroup:
    """Make a checked group in a store of its own (collective over its ranks)."""
    store, rank, timeout = options.store, options.group_rank, options.timeout
    waits = asked.checking is Checking.WAIT
    place = PrefixStore("compare/shm", store)
    comparer: Comparer | None = make_shared_memory_comparer(place, rank, timeout, members, set_up, waits=waits)
    if comparer is None:
        comparer = GlooComparer(store, rank, timeout, members.global_ranks)
        asked = replace(asked, checking=Checking.WAIT if asked.checking.compares else asked.checking)
    made = TorchBackends(store, rank, timeout, asked.names, comparer.peers)
    try:
        made.connect(set_up.deadline)
    except BaseException as error:
        comparer.peers.report_failure(error)  # the other ranks wait to be connected
        comparer.close()
        raise
    return CheckedProcessGroup(comparer, asked, made)
