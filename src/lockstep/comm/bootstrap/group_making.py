"""Making the default group, once all workers are known to be there: its hosts, Gloo's interface, torch's group."""

import contextlib
import logging
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store

# Now, because `lockstep.drop_in` binds torch's name to another function.
from torch.distributed import init_process_group as make_torchs_group

from lockstep.comm.bootstrap.backends import backend_names, backend_on_hosts, uses_gloo_anywhere, warn_of_nccl
from lockstep.comm.bootstrap.interface import choose_interface, describe_interfaces
from lockstep.comm.bootstrap.store import OpenedStore, StoreLocation
from lockstep.comm.gloo import gloo_connected_in_time
from lockstep.comm.hosts import GroupHosts, GroupMembers, GroupSetUp, find_hosts, remember_hosts, setting_up
from lockstep.comm.stored_values import Deadline
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.errors import GroupError
from lockstep.recording import EventKind, own_recorder
from lockstep.settings import read_settings
from lockstep.torch_private.groups import default_timeout

_LOGGER = logging.getLogger("lockstep")
_LEAST_SECONDS = 1.0
"""The shortest timeout of each step of the set-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """With what a group is made."""

    backend: str
    is_ours: bool
    """Whether we have chosen them, and not the caller."""
    check: bool | None
    """Whether calls are compared; None to do so where it is cheap."""


def make_next_group(backend: str, store: Store, rank: int, world_size: int) -> None:
    """Make the default group of workers that replace others (collective); GroupError if one is lost meanwhile.

    Their launcher has numbered them, for this group alone, and on one host: there is no startup handshake.
    No other group may have the prefix of `store`.
    """
    deadline = Deadline.after(default_timeout(backend))
    opened = OpenedStore(store=store, rank=rank, world_size=world_size)
    location = StoreLocation(url="", scheme="", host="", port=0, is_hosted=False, store=store)
    backend, set_up = find_set_up(
        BackendChoice(backend=backend, is_ours=False, check=read_settings().check()), opened, location, deadline
    )
    with making_group(set_up, store, rank, world_size, uses_gloo="gloo" in backend.lower()):
        make_torchs_group(backend, store=store, rank=rank, world_size=world_size)
    record_this_worker(rank, world_size, store)


def find_set_up(
    choice: BackendChoice, opened: OpenedStore, location: StoreLocation, deadline: Deadline
) -> tuple[str, GroupSetUp]:
    """Find out where the workers are, and set Gloo's interface (collective).

    On several hosts, the returned backends may differ from the chosen ones.
    """
    store, rank, backend = opened.store, opened.rank, choice.backend
    hosts = find_hosts(
        store, rank, GroupMembers(names=range(opened.world_size)), deadline.with_at_least(_LEAST_SECONDS)
    )
    backend = backend_on_hosts(backend, hosts, rank, is_chosen=choice.is_ours)
    warn_of_nccl(backend, hosts, rank)
    if uses_gloo_anywhere(backend):
        choose_interface(store, rank, hosts, location, deadline.with_at_least(_LEAST_SECONDS))
    return backend, GroupSetUp(
        hosts=hosts,
        deadline=deadline.with_at_least(_LEAST_SECONDS),
        compares_calls=_decide_check(choice.check, backend, rank, hosts),
        waits=choice.check is not None,
        subgroups_compare=choice.check is not False,
        explains_losses=backend_names(backend) == ["gloo"] and _share_memory(opened.world_size, hosts),
    )


@contextlib.contextmanager
def making_group(
    set_up: GroupSetUp | None, store: Store | None, rank: int, world_size: int, *, uses_gloo: bool
) -> Iterator[None]:
    """Record and explain what happens while torch makes the group inside this context (collective).

    `set_up` and `store` are None for a group without a store; `uses_gloo`: torch itself makes a Gloo backend.
    """
    with (
        waiting_for_others("connecting the process group"),
        _network_explained(rank),
        _in_time(set_up, store, rank, world_size, uses_gloo=uses_gloo),
    ):
        yield


def waiting_for_others(what: str) -> AbstractContextManager[None]:
    """Record in what this worker waits for others, under a launcher of ours; without one nothing is recorded yet."""
    return own_recorder().during(EventKind.WAITING, -1, text=what)


def _decide_check(check: bool | None, backend: str, rank: int, hosts: GroupHosts) -> bool:
    """Return whether the group compares calls itself; if that is not decided and costs too much, rank 0 logs it."""
    names = set(backend_names(backend)) - {"shm"}
    if check is not None or not names or len(hosts.identities) == 1:
        return bool(check and names)
    is_cheap = hosts.is_one_host and names == {"gloo"}
    if not is_cheap and rank == 0:
        _LOGGER.warning(
            "Calls of %s are not compared between ranks%s: ranks that make different calls may hang, or get wrong "
            "results. To compare them, which makes each call a little slower, set LOCKSTEP_CHECK=1 or pass check=True "
            "to init_process_group; LOCKSTEP_CHECK=0 suppresses this line. (LS118)",
            " and ".join(sorted(names)),
            "" if hosts.is_one_host else " on several hosts",
        )
    return is_cheap


def _share_memory(world_size: int, hosts: GroupHosts) -> bool:
    return world_size > 1 and not hosts.why_not_shared(range(world_size))


@contextlib.contextmanager
def _in_time(
    set_up: GroupSetUp | None, store: Store | None, rank: int, world_size: int, *, uses_gloo: bool
) -> Iterator[None]:
    """Pass hosts and deadline to the group that torch makes inside this context (collective)."""
    if set_up is None or store is None:
        yield
        return
    with setting_up(set_up), contextlib.ExitStack() as until_made:
        if uses_gloo and not set_up.compares_calls and not set_up.explains_losses:
            members = GroupMembers(names=range(world_size))
            until_made.enter_context(gloo_connected_in_time(store, rank, members, set_up.deadline))
        yield
    if set_up.hosts is not None and dist.GroupMember.WORLD is not None:
        remember_hosts(dist.GroupMember.WORLD, set_up.hosts)


@contextlib.contextmanager
def _network_explained(rank: int) -> Iterator[None]:
    """Explain an error of torch when it cannot connect the workers after the handshake."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise GroupError(
            "All workers had connected, but then the store of the rendezvous was lost. Look at the log of rank 0. "
            f"torch said: {str(error).splitlines()[0]} (LS112)"
        ) from error
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        given = read_settings().gloo_interface()
        raise GroupError(
            f"Rank {rank} reached the rendezvous, but Gloo could not connect it to the other workers. Either one was "
            "lost since: look at the logs of the others. Or something, a firewall say, is between their addresses: "
            f"host {socket.gethostname()!r} has {describe_interfaces()}"
            f"{f'; GLOO_SOCKET_IFNAME is {given!r}' if given else ''}. Gloo said: {str(error).splitlines()[0]} (LS113)"
        ) from error
