"""Which network interface Gloo is to use: one over which the other hosts can be reached.

Gloo listens on the address that the host's own name resolves to. On many hosts that is 127.0.1.1, or an address of a
network without a route to the others, and they time out; the usual advice is to set GLOO_SOCKET_IFNAME by hand, on each
host to another name. But every worker has just connected to rank 0's store, so it has one route that works:

rank r                                                     the store
------                                                     ---------
1 its own address on the route to rank 0's host           ->  route/<r>
2 the addresses of all                                    <-  route/*
3 takes its address of step 1, unless that is loopback, as on rank 0's host if its own name resolves to loopback:
  then its own address on the route to a worker of another host.
4 the interface that has it -> GLOO_SOCKET_IFNAME

Workers that are all on one host use loopback, without the store.
"""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from torch.distributed import PrefixStore, Store

from lockstep.comm.bootstrap.handshake import wait_for_readers
from lockstep.comm.hosts import GroupHosts, GroupMembers, read_all, wait_for_members
from lockstep.comm.stored_values import Deadline, read_record, to_stored
from lockstep.errors import GroupError
from lockstep.settings import read_settings, set_gloo_interface

_ANY_PORT = 9
"""Port of an address that is only looked up."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """The route from one worker to the host of rank 0."""

    source: str
    """The worker's own address on the route; empty if there is none."""
    given: str
    """GLOO_SOCKET_IFNAME, if the user has set it."""
    is_given_loopback: bool
    """Whether other hosts cannot reach that interface."""


def explain_wrong_interface() -> str:
    """Return a message if GLOO_SOCKET_IFNAME names an interface that this host lacks, else an empty text (local)."""
    given = read_settings().gloo_interface()
    here = psutil.net_if_addrs()
    lacking = [name for name in given.split(",") if name.lstrip("=") not in here] if given else []
    if not lacking:
        return ""
    return (
        f"GLOO_SOCKET_IFNAME is {given!r}, but {socket.gethostname()} has no interface {lacking[0]!r}; it has "
        f"{', '.join(sorted(here))}. Unset it, and Lockstep finds the interface by itself, or name one of "
        "these. (LS113)"
    )


def choose_interface(store: Store, rank: int, hosts: GroupHosts, store_host: str, deadline: Deadline) -> None:
    """Set GLOO_SOCKET_IFNAME for this process, unless the user has (collective).

    If a user has set it to loopback and there are several hosts, all ranks raise. `store` is for this group alone;
    `store_host`: the host of rank 0's or the launcher's, empty if it is not known.
    """
    if hosts.is_one_host:
        if not read_settings().gloo_interface():
            _use_interface_of(_LOOPBACK)
        return
    if not store_host:
        return
    shared = PrefixStore("route", store)
    shared.set(str(rank), to_stored(_find_route(store_host)))
    ranks = range(len(hosts.identities))
    keys = list(map(str, ranks))
    wait_for_members(shared, keys, GroupMembers(global_ranks=ranks), deadline)
    stored = zip(keys, read_all(shared, keys), strict=True)
    routes = [read_record(f"route/{key}", text, _Route) for key, text in stored]
    problem = _explain_loopback(routes, hosts)
    if problem:
        wait_for_readers(shared, len(routes))
        raise GroupError(problem)
    if not routes[rank].given:
        _use_interface_of(_own_address(routes, hosts, rank))


def _use_interface_of(address: str) -> None:
    name = next((name for name in psutil.net_if_addrs() if address and address in _addresses_of(name)), "")
    if name:
        set_gloo_interface(name)


def describe_interfaces() -> str:
    found = (f"{name} ({addresses[0]})" for name in psutil.net_if_addrs() if (addresses := _addresses_of(name)))
    return ", ".join(sorted(found))


def _find_route(store_host: str) -> _Route:
    given = read_settings().gloo_interface()
    return _Route(
        source=_source_towards(store_host),
        given=given,
        is_given_loopback=bool(given) and all(map(_is_loopback, _addresses_of(given.split(",")[0].lstrip("=")))),
    )


def _own_address(routes: Sequence[_Route], hosts: GroupHosts, rank: int) -> str:
    """Return the address of this host from which the others can be reached; empty if there is none."""
    mine, local = routes[rank], hosts.local_ranks(rank)
    others = [route for peer, route in enumerate(routes) if peer not in local]
    if mine.source and not _is_loopback(mine.source):
        return mine.source
    reachable = (route.source for route in others if route.source and not _is_loopback(route.source))
    return _source_towards(next(reachable, ""))


def _explain_loopback(routes: Sequence[_Route], hosts: GroupHosts) -> str:
    """Return which worker is set to use an interface that other hosts cannot reach; empty if there is none."""
    for rank, route in enumerate(routes):
        local = hosts.local_ranks(rank)
        other = next((peer for peer in range(len(routes)) if peer not in local), None)
        if route.is_given_loopback and other is not None:
            return (
                f"GLOO_SOCKET_IFNAME is {route.given!r} for rank {rank} on host {hosts.host_names[rank]!r}, where no "
                f"other host can reach it, and rank {other} is on another host, {hosts.host_names[other]!r}. Unset "
                "GLOO_SOCKET_IFNAME: Lockstep finds the interface by itself. (LS113)"
            )
    return ""


def _source_towards(host: str) -> str:
    """Return the address of this host from which packets to `host` leave; empty if there is no route."""
    if not host:
        return ""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it looks up the route
            source: str = probe.getsockname()[0]
            return source
    except OSError:
        return ""


def _addresses_of(name: str) -> list[str]:
    """Return the addresses of an interface, IPv4 first, without the interface's name in them."""
    internet = (socket.AF_INET, socket.AF_INET6)
    found = [entry for entry in psutil.net_if_addrs().get(name, []) if entry.family in internet]
    return [entry.address.partition("%")[0] for entry in sorted(found, key=lambda entry: internet.index(entry.family))]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
