"""The backends that Lockstep adds to torch.distributed: "shm", and "checked" for groups of torch that compare calls."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from lockstep.comm.calls import describe_call
from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.gloo import GlooComparer, GlooSockets, connect_gloo, gloo_connected_in_time
from lockstep.comm.group import CheckedProcessGroup, Comparer, type_of_backend
from lockstep.comm.hosts import (
    Checking,
    GroupMembers,
    GroupSetUp,
    current_set_up,
    known_hosts,
    remember_hosts,
    say_not_shared,
)
from lockstep.comm.lost_ranks import report_uncaught_exceptions
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.shm.group import ShmProcessGroup, make_shared_memory_comparer, make_shm_group
from lockstep.comm.shm.rendezvous import NotShared
from lockstep.comm.shm.torch_beside import NO_ACCELERATORS, AcceleratorBackends
from lockstep.comm.stored_values import Deadline
from lockstep.errors import PeerLostError
from lockstep.torch_private.groups import (
    GroupRequest,
    intercept_group_making,
    intercept_timeouts,
    leave_recording_to,
    make_backend,
    register_backend,
    set_default_backend,
)


def register_backends() -> None:
    """Register them with torch.distributed; doing so again changes nothing (local)."""
    if not dist.is_available() or hasattr(dist.Backend, "SHM"):
        return
    dist.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("checked", _make_checked, extended_api=True, devices=["cpu", "cuda"])
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
    if names.get("cpu") == "shm":
        others = AcceleratorBackends(
            names={device: name for device, name in names.items() if name != "shm"},
            checking=checking,
            subgroups=Checking.OFF if set_up is None else set_up.subgroups,
        )
        return request.make("shm", others)
    return request.make() if checking is Checking.OFF else request.make("checked", (names, checking))


def _checking_of_subgroup(default: Any, names: Mapping[str, str]) -> Checking:
    """A group of some ranks of the default group does as that one does."""
    kinds = set(names.values())
    if isinstance(default, CheckedProcessGroup) and kinds <= {"gloo", *default.backend_names.values()}:
        return default.checking
    if isinstance(default, ShmProcessGroup) and (default.accelerators.checking.compares or kinds == {"gloo"}):
        return default.accelerators.subgroups
    return Checking.OFF


def _set_timeout(group: ProcessGroup, timeout: timedelta) -> bool:
    if not isinstance(group, ShmProcessGroup | CheckedProcessGroup):
        return False
    group.set_timeout(timeout)
    return True


def _make_shm(options: Any, accelerators: Any = None) -> ShmProcessGroup | CheckedProcessGroup:
    """Make the group that torch requests (collective over its ranks)."""
    report_uncaught_exceptions()
    members = _read_members(options)
    set_up = _read_set_up(options, members)
    group: ShmProcessGroup | CheckedProcessGroup
    others = accelerators if isinstance(accelerators, AcceleratorBackends) else NO_ACCELERATORS
    found, hosts = make_shm_group(options.store, options.group_rank, options.timeout, members, set_up, others)
    if isinstance(found, NotShared):
        default = dist.GroupMember.WORLD
        is_said = default is not None and "shm" in dist.get_backend_config(default)  # when that group was made
        if options.group_rank == 0 and len(members.global_ranks) > 1 and not is_said:
            say_not_shared(found.reason)
        known = GroupSetUp(hosts=hosts, deadline=set_up.deadline)
        names = {"cpu": "gloo", **others.names}
        group = _check_group(options, names, Checking.WAIT, members, known)
    else:
        group = found
    remember_hosts(group, hosts)
    OPEN_GROUPS.add(group)
    return group


def _make_checked(options: Any, asked: tuple[Mapping[str, str], Checking]) -> CheckedProcessGroup:
    """Make the group that torch requests, of a backend for each device (collective over its ranks)."""
    report_uncaught_exceptions()
    members = _read_members(options)
    set_up = _read_set_up(options, members)
    group = _check_group(options, *asked, members, set_up)
    if set_up.hosts is not None:
        remember_hosts(group, set_up.hosts)
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


def _check_group(
    options: Any, backends: Mapping[str, str], checking: Checking, members: GroupMembers, set_up: GroupSetUp
) -> CheckedProcessGroup:
    """Make a checked group in a store of its own (collective over its ranks)."""
    store, rank, timeout = options.store, options.group_rank, options.timeout
    place = PrefixStore("compare/shm", store)
    comparer: Comparer | None = make_shared_memory_comparer(
        place, rank, timeout, members, set_up, waits=checking is Checking.WAIT
    )
    if comparer is None:
        comparer = GlooComparer(store, rank, timeout, members.global_ranks)
        checking = Checking.WAIT if checking.compares else checking
    with _failure_reported(comparer):
        watched = replace(members, find_lost=comparer.peers.find_any_lost)
        inner, sockets = _connect(store, rank, timeout, backends, watched, set_up)
    return CheckedProcessGroup(inner, comparer, checking, backends, members.global_ranks, sockets)


def _connect(
    store: Store,
    rank: int,
    timeout: timedelta,
    backends: Mapping[str, str],
    members: GroupMembers,
    set_up: GroupSetUp,
) -> tuple[ProcessGroup, GlooSockets | None]:
    """Make torch's backends (collective), with the connections of Gloo; where a rank is lost, that is the error."""
    size = len(members.global_ranks)
    inner = ProcessGroup(store, rank, size)
    made: dict[str, Any] = {}
    sockets: GlooSockets | None = None
    with ExitStack() as until_made:
        if "gloo" in backends.values():
            until_made.enter_context(gloo_connected_in_time(store, rank, members, set_up.deadline))
        for device, name in backends.items():
            if name not in made:
                place = PrefixStore(f"inner/{name}", store)
                if name == "gloo":
                    make = partial(dist.ProcessGroupGloo, place, rank, size, timeout)
                    made[name], sockets = connect_gloo(place, size, make, members.find_lost)
                else:
                    made[name] = make_backend(name, place, rank, size, timeout)
            register_backend(inner, torch.device(device), type_of_backend(name), made[name])
    set_default_backend(inner, type_of_backend(next(iter(backends.values()))))
    return inner, sockets


@contextmanager
def _failure_reported(comparer: Comparer) -> Iterator[None]:
    """Report to the other ranks, which wait to be connected, why this one will not be."""
    try:
        yield
    except BaseException as error:
        comparer.peers.report_failure(error)
        comparer.close()
        raise
