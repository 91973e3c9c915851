"""The backends that Lockstep adds to torch.distributed: "shm", and "checked" for groups of torch that compare calls."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast, final

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from lockstep.comm.calls import describe_call
from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.checked import CheckedProcessGroup, Comparer
from lockstep.comm.gloo import GlooComparer
from lockstep.comm.group import LockstepGroup
from lockstep.comm.hosts import (
    Checking,
    GroupBackends,
    GroupHosts,
    GroupMembers,
    GroupSetUp,
    current_set_up,
    known_hosts,
    remember_hosts,
    say_not_shared,
    say_shared_inside,
)
from lockstep.comm.hosts_carrier import HostsCarrier
from lockstep.comm.lost_ranks import report_uncaught_exceptions
from lockstep.comm.open_calls import OPEN_GROUPS
from lockstep.comm.shm.group import (
    make_shared_memory_comparer,
    make_shm_group,
)
from lockstep.comm.shm.rendezvous import NotShared
from lockstep.comm.stored_values import Deadline
from lockstep.comm.torch_backends import TorchBackends
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.user_line import find_user_line
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
    members, timeout = _read_members(options), _timeout_of(options)
    set_up = _read_set_up(options, members)
    backends = asked if isinstance(asked, GroupBackends) else GroupBackends(names={"cpu": "shm"})
    hosts = set_up.hosts
    place = _NewGroup(store=options.store, rank=options.group_rank, timeout=timeout, members=members)
    group: LockstepGroup | NotShared | None = None
    if backends.names.get("cpu") == "shm":
        group, hosts = make_shm_group(options.store, options.group_rank, timeout, members, set_up, backends)
    if isinstance(group, NotShared):
        assert hosts is not None
        if options.group_rank == 0:
            _say_not_shared(group.reason, hosts)
        backends = GroupBackends(names={"cpu": "gloo", **backends.of_torch}, checking=Checking.WAIT)
        set_up = GroupSetUp(hosts=hosts, deadline=set_up.deadline)
        if hosts.share_inside:
            group = _carry_between_hosts(place, backends, set_up, hosts)
    if not isinstance(group, LockstepGroup):
        group = _check_group(place, backends, set_up)
    if dist.GroupMember.WORLD is not None:
        group.note_place(find_user_line())
    if hosts is not None:
        remember_hosts(group, hosts)
    OPEN_GROUPS.add(group)
    return group


def _say_not_shared(reason: str, hosts: GroupHosts) -> None:
    default = dist.GroupMember.WORLD
    if len(hosts.identities) == 1 or (default is not None and "shm" in dist.get_backend_config(default)):
        return  # it was said when that group was made
    if hosts.share_inside:
        say_shared_inside(len(hosts.hosts))
    else:
        say_not_shared(reason)


def _read_set_up(options: Any, members: GroupMembers) -> GroupSetUp:
    """Return what is known of the group that torch requests: of a subgroup, from the default group (local)."""
    known = current_set_up()
    if known is not None:
        return known
    default = dist.GroupMember.WORLD
    hosts = None if default is None else known_hosts(default)
    return GroupSetUp(
        hosts=None if hosts is None else hosts.of_ranks(members.global_ranks),
        deadline=Deadline.after(_timeout_of(options)),
    )


def _timeout_of(options: Any) -> timedelta:
    """Return how long calls may take: where a subgroup has torch's usual limit, no longer than in the default group."""
    default = dist.GroupMember.WORLD
    is_usual = options.timeout == dist.constants.default_pg_timeout
    given: timedelta = default.timeout if is_usual and isinstance(default, LockstepGroup) else options.timeout
    return given


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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _NewGroup:
    """What the making of each group needs: a store of its own, this rank in it, and who its ranks are."""

    store: Store
    rank: int
    timeout: timedelta
    members: GroupMembers

    def of_ranks(self, name: str, ranks: Sequence[int]) -> "_NewGroup":
        """Return the same for a group of some of its ranks, of which this is one."""
        names = [self.members.global_ranks[rank] for rank in ranks]
        return _NewGroup(
            store=PrefixStore(name, self.store),
            rank=ranks.index(self.rank),
            timeout=self.timeout,
            members=GroupMembers(global_ranks=names, find_lost=self.members.find_lost),
        )


def _carry_between_hosts(
    place: _NewGroup, asked: GroupBackends, set_up: GroupSetUp, hosts: GroupHosts
) -> CheckedProcessGroup:
    """Make a group of which the hosts have several ranks each (collective over its ranks)."""
    here = hosts.local_ranks(place.rank)
    at_home = place.of_ranks(f"host/{hosts.hosts.index(here)}", here)
    inside = GroupSetUp(hosts=hosts.of_ranks(here), deadline=set_up.deadline)
    shared = GroupBackends(names={"cpu": "shm"})
    local, _ = make_shm_group(at_home.store, at_home.rank, place.timeout, at_home.members, inside, shared)
    if isinstance(local, NotShared):
        raise GroupError(
            f"The ranks of host {hosts.host_names[place.rank]!r} do not share memory: {local.reason}. (LS112)"
        )
    lane: CheckedProcessGroup | None = None
    with _leaving_on_failure(local):
        if at_home.rank < min(map(len, hosts.hosts)):
            ranks = [each[at_home.rank] for each in hosts.hosts]
            between = GroupSetUp(hosts=hosts.of_ranks(ranks), deadline=set_up.deadline)
            explained = GroupBackends(names={"cpu": "gloo"}, checking=Checking.EXPLAIN)
            lane = _check_group(place.of_ranks(f"lane/{at_home.rank}", ranks), explained, between, compares=False)
        group = _check_group(place, asked, set_up, compares=False)
    carrier = HostsCarrier(hosts, place.rank, place.members.global_ranks, local.exchange, lane)
    group.carry_sums(carrier, local, lane)
    return group


@contextmanager
def _leaving_on_failure(group: LockstepGroup) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        group.report_failure(error)  # the other ranks wait for this one
        group.shutdown()
        raise


def _check_group(
    place: _NewGroup, asked: GroupBackends, set_up: GroupSetUp, *, compares: bool = True
) -> CheckedProcessGroup:
    """Make a checked group (collective over its ranks); unless it `compares`, others compare its calls."""
    store, rank, timeout, members = place.store, place.rank, place.timeout, place.members
    waits = asked.checking is Checking.WAIT
    comparer: Comparer | None = None
    if compares:
        shared = PrefixStore("compare/shm", store)
        comparer = make_shared_memory_comparer(shared, rank, timeout, members, set_up, waits=waits)
    if comparer is None:
        comparer = GlooComparer(store, rank, timeout, members.global_ranks, compares=compares)
        asked = replace(asked, checking=Checking.WAIT if asked.checking.compares else asked.checking)
    made = TorchBackends(store, rank, timeout, asked.names, comparer.peers)
    try:
        made.connect(set_up.deadline)
    except BaseException as error:
        comparer.peers.report_failure(error)  # the other ranks wait to be connected
        comparer.close()
        raise
    return CheckedProcessGroup(comparer, asked, made)
