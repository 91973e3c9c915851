"""Making a checked group: torch's backends, and what compares the calls of the ranks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from lockstep.comm.comparer import CallComparer
from lockstep.comm.gloo import connect_gloo, gloo_connected_in_time
from lockstep.comm.gloo_comparer import GlooComparer
from lockstep.comm.gloo_sockets import GlooSockets
from lockstep.comm.group import CheckedProcessGroup, type_of_backend
from lockstep.comm.hosts import GroupMembers, GroupSetUp
from lockstep.comm.shm.set_up import make_shared_memory_comparer
from lockstep.torch_private.groups import make_backend, register_backend, set_default_backend


def check_group(
    store: Store,
    rank: int,
    timeout: timedelta,
    backends: Mapping[str, str],
    members: GroupMembers,
    set_up: GroupSetUp,
    *,
    waits: bool = True,
    compares: bool = True,
) -> CheckedProcessGroup:
    """Make a checked group in a store of its own (collective over its ranks).

    Without `waits`, on one host, a call costs less, and the group cannot be used after a mismatch. Without `compares`
    lost ranks are named all the same.
    """
    place = PrefixStore("compare/shm", store)
    shared = make_shared_memory_comparer(place, rank, timeout, members, set_up, waits=waits)
    comparer: CallComparer = shared if shared is not None else GlooComparer(store, rank, timeout, members.names)
    with _failure_reported(comparer):
        connected = _connect(store, rank, timeout, backends, replace(members, find_lost=comparer.find_any_lost), set_up)
    return CheckedProcessGroup(connected.inner, comparer, backends, members.names, connected.sockets, compares=compares)


@dataclass(frozen=True, slots=True)
class _Connected:
    """Torch's backends of a group."""

    inner: ProcessGroup
    sockets: GlooSockets | None
    """The connections of Gloo, if it is one of them."""


def _connect(
    store: Store,
    rank: int,
    timeout: timedelta,
    backends: Mapping[str, str],
    members: GroupMembers,
    set_up: GroupSetUp,
) -> _Connected:
    """Make torch's backends (collective); where a rank is lost meanwhile, that is the error."""
    size = len(members.names)
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
                    make = partial(_make_gloo, place, rank, size, timeout)
                    made[name], sockets = connect_gloo(place, size, make, members.find_lost)
                else:
                    made[name] = make_backend(name, place, rank, size, timeout)
            register_backend(inner, torch.device(device), type_of_backend(name), made[name])
    set_default_backend(inner, type_of_backend(next(iter(backends.values()))))
    return _Connected(inner, sockets)


@contextmanager
def _failure_reported(comparer: CallComparer) -> Iterator[None]:
    """Report to the other ranks, which wait to be connected, why this one will not be."""
    try:
        yield
    except BaseException as error:
        comparer.report_failure(error)
        comparer.close()
        raise


def _make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
