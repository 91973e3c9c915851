"""Setting up and tearing down the process group, with torch's arguments and errors that name the remedy.

read settings -> open the store -> startup handshake, hosts of all -> Gloo's interface -> torch makes the group
(here)           (store.py)        (handshake.py)                     (interface.py)      (here)
"""

import contextlib
import datetime
import logging
import os
import socket
import uuid
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed import init_process_group as make_torchs_group

from lockstep.comm.bootstrap.channel_store import inherited_store
from lockstep.comm.bootstrap.handshake import Announcement, hosts_of_generation, report_duplicate_rank, run_handshake
from lockstep.comm.bootstrap.identity import (
    WorldVariables,
    find_rank_and_size,
    find_world,
    is_announced,
    read_torch_variables,
)
from lockstep.comm.bootstrap.interface import choose_interface, describe_interfaces, explain_wrong_interface
from lockstep.comm.bootstrap.store import (
    OpenedStore,
    StoreLocation,
    connect_to_other,
    explain_port_in_use,
    find_store_location,
    open_store,
)
from lockstep.comm.gloo import gloo_connected_in_time
from lockstep.comm.hosts import (
    Checking,
    GroupHosts,
    GroupMembers,
    GroupSetUp,
    find_hosts,
    remember_hosts,
    say_not_shared,
    setting_up,
    why_alone,
)
from lockstep.comm.nccl_defects import explain_defects
from lockstep.comm.stored_values import Deadline
from lockstep.comm.world import World, current_world
from lockstep.devices.transfer import own_accelerator, take_gpu
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.errors import GroupError
from lockstep.processes.ending import exit_quickly
from lockstep.processes.forking import call_at_exit_here
from lockstep.processes.host import keep_temporary_files_in
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.recording import EventKind, own_recorder
from lockstep.settings import read_settings
from lockstep.torch_private.groups import default_timeout

_LOGGER = logging.getLogger("lockstep")
_FOR_CPU = frozenset({"gloo", "shm", "mpi", "fake"})
"""Backends with which a worker needs no accelerator."""
_INTERNAL = frozenset({"checked", "fake", "undefined"})
"""Backends that users should not pass by name."""
_STORELESS = frozenset({"mpi", "fake"})
"""Backends that need no store: there can be no handshake."""
_LEAST_SECONDS = 1.0
"""The shortest timeout of each step of the set-up."""
_REPORT_TIMEOUT = datetime.timedelta(seconds=20)
"""How long a worker that cannot take part tries to report that to the others: connecting to a store may take 5 s
or more if no name server answers."""
_DUPLICATE_TIMEOUT = datetime.timedelta(seconds=7)
"""How long the program that has rank 0's port may take to answer as a store: when torch connects, it looks up
the name of the address, which alone takes 5 s if the name server does not answer."""
_TOKEN = uuid.uuid4().hex


def init_process_group(  # the parameters are torch's, in torch's order
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    check: bool | None = None,
) -> None:
    """Set up the default process group (collective over the world that is made).

        ls.init_process_group()    # in a script that torchrun, srun, mpirun or `lockstep run` has started

    Same arguments as `torch.distributed.init_process_group`, except that the backend is chosen by device when it
    is not given: shared memory for CPU tensors, which is Gloo where the workers are not all on one host, and beside it
    the accelerator's own backend where there is one, such as NCCL for CUDA tensors.

    The GPU of this worker's local rank becomes the current device, unless the worker has used one before. Over several
    hosts, Gloo uses the interface over which the others can be reached, unless GLOO_SOCKET_IFNAME is set.

    Before torch makes the group, the workers compare their settings through the store: if they differ, or a rank is
    missing or present twice, all workers raise an error that names it.

    Args:
        backend: `"shm"`, `"nccl"`, `"gloo"`, `"cpu:shm,cuda:nccl"`, ...; None to choose.
        init_method: `"env://"` (the default), `"tcp://host:port"` or `"file:///path"`. For `env://`, the
            variables are set by torchrun, Slurm's srun, mpirun, a PyTorchJob of Kubernetes or another launcher.
        timeout: How long a collective may take, and how long the whole set-up may take here; None for the backend's
            default.
        world_size: Number of workers; needed unless the method is `env://`.
        rank: Number of this worker; needed unless the method is `env://`.
        store: A store that all workers share, instead of `init_method`.
        group_name: Accepted because torch does; without effect there too.
        pg_options: Options of the backend, passed on to torch.
        device_id: The accelerator of this worker. None: with NCCL or another accelerator's backend and a local rank,
            the one of that number.
        check: Whether the calls of all ranks are compared before they are made, here and in the groups that `new_group`
            makes of the same backend or of Gloo. None to read LOCKSTEP_CHECK, and without that to compare them where it
            is cheap: with Gloo on one host. Shared memory always compares them. With True a call waits for all ranks
            before it is made, and the group stays usable after a mismatch; by default it does neither.

    Raises:
        GroupError: There is a group already; a variable is missing or not a number; the rank is outside the world,
            or present twice; a rank is missing; the workers have different world sizes or backends; the
            rendezvous cannot be reached, or its port is taken; this torch lacks the backend, or it is not for the
            device.
        UsageError: LOCKSTEP_CHECK is neither a yes nor a no.
        ValueError: Both `store` and `init_method` are given, or the timeout is not positive.
        TypeError: The timeout is not a timedelta.
    """
    if dist.is_initialized():
        raise GroupError(
            f"This process is rank {dist.get_rank()} of a process group already. A worker that ls.launch started "
            "has its group; elsewhere call ls.destroy_process_group() before making another one. (LS106)"
        )
    if store is not None and init_method is not None:
        raise ValueError("Both store and init_method are given; give only one of them. (LS103)")
    if not isinstance(timeout, datetime.timedelta | None):
        raise TypeError(f"timeout is {timeout!r}, expected a datetime.timedelta such as timedelta(minutes=5). (LS103)")
    if timeout is not None and timeout <= datetime.timedelta(0):
        raise ValueError(f"timeout is {timeout}, expected more than zero, such as timedelta(minutes=5). (LS103)")
    is_ours = backend is None
    is_asked = not is_ours and not isinstance(backend, ChosenBackend)
    backend = choose_backend(device_id) if backend is None else backend
    is_env = store is None and (init_method or "env://").startswith("env://")
    environment = read_settings()
    variables = (find_world if is_env else read_torch_variables)(environment.launchers())
    problem = (
        explain_missing_backend(backend)
        or (explain_unshared(backend) if is_asked else "")
        or explain_unusable(backend, variables, device_id)
    )
    check = environment.check() if check is None else check
    with _raising_first(problem):
        rank, world_size = find_rank_and_size(variables, init_method, rank, world_size, has_store=store is not None)
    set_up: GroupSetUp | None = None
    if backend.lower() not in _STORELESS:
        asked = ",".join(sorted(backend.lower().split(","))) + ("" if check is None else f" with check={check}")
        me = Announcement(
            rank=rank,
            world_size=world_size,
            backend=asked,
            process=f"process {os.getpid()} on host {socket.gethostname()}",
            token=f"{_TOKEN}-{os.getpid()}",  # a forked child has its parent's first half
        )
        is_own_place = is_env and (str(rank), str(world_size)) == (variables.rank, variables.world_size)
        own_store = inherited_store() if is_own_place else None
        if own_store is not None:
            exit_quickly()  # its launcher, and the other ranks, wait for its end
            keep_temporary_files_in(environment.folder())
        location = find_store_location(init_method or "env://", own_store or store, variables)
        limit = timeout if timeout is not None else default_timeout(backend)
        limit = _REPORT_TIMEOUT if problem else limit
        deadline = Deadline.after(limit)
        with waiting_for_others("the startup of the process group"):
            opened, hosts = _open_and_handshake(me, problem, location, deadline)
        init_method, store, rank, world_size = None, opened.store, opened.rank, opened.world_size
        backend, set_up = find_set_up(
            backend, store, rank, hosts, location.host, deadline, is_ours=is_ours, check=check
        )
    elif problem:
        raise GroupError(problem)
    if device_id is None and not is_ours:
        device_id = own_device(backend, variables)
    with making_group(set_up, store, rank, world_size, uses_gloo="gloo" in backend.lower()):
        make_torchs_group(backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id)
    record_this_worker(dist.get_rank(), dist.get_world_size(), store)


def launched_world() -> WorldVariables | None:
    """Return the variables of the launcher that started this process as one of several workers, or None (local)."""
    variables = read_settings().launchers()
    if not dist.is_initialized():
        settings = find_world(variables)
        return settings if is_announced(settings) else None
    if dist.get_world_size() == 1:
        return None
    try:
        return find_world(variables)
    except GroupError:  # there is a group nevertheless: Ray Train makes it in processes that Slurm's step started
        return read_torch_variables(variables)


def join_world(device: torch.device | None = None) -> World:
    """Return this worker's place in the default group, which is made first if a launcher started this worker.

    Collective where that is so: if torchrun, srun, mpirun or the like started this process as one of several workers
    and there is no group, this makes it, and tears it down when the interpreter ends. In any other process without
    a group the world is this worker alone.
    """
    if not dist.is_initialized() and launched_world() is not None:
        init_process_group(choose_backend(device))
        call_at_exit_here(destroy_process_group)
    return current_world()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Tear down `group`, or the default group and with it all others; calling it again does nothing (local)."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group(group)


def make_next_group(backend: str, store: Store, rank: int, world_size: int) -> None:
    """Make the default group of workers that replace others (collective); GroupError if one is lost meanwhile.

    Their launcher has numbered them, for this group alone, and on one host: there is no startup handshake.
    No other group may have the prefix of `store`.
    """
    deadline = Deadline.after(default_timeout(backend))
    hosts = find_hosts(store, rank, GroupMembers(global_ranks=range(world_size)), deadline)
    check = read_settings().check()
    backend, set_up = find_set_up(backend, store, rank, hosts, "", deadline, is_ours=False, check=check)
    with making_group(set_up, store, rank, world_size, uses_gloo="gloo" in backend.lower()):
        make_torchs_group(backend, store=store, rank=rank, world_size=world_size)
    record_this_worker(rank, world_size, store)


def _open_and_handshake(
    me: Announcement, problem: str, location: StoreLocation, deadline: Deadline
) -> tuple[OpenedStore, GroupHosts]:
    """Connect to the other workers (collective); return a store for this group alone, and where its ranks are.

    `problem`: why this worker cannot take part; empty if it can.
    """
    while True:
        with _raising_first(problem):
            opened = open_store(location, me.rank, me.world_size, deadline.left(_LEAST_SECONDS))
            if opened is None:
                limit = min(deadline.left(_LEAST_SECONDS), _DUPLICATE_TIMEOUT)
                raise GroupError(explain_port_in_use(location, _report_duplicate(me, location, limit)))
        if location.store is None:
            opened.store.set_timeout(deadline.limit)
        rank, world_size = opened.rank, opened.world_size
        generation = run_handshake(
            opened.store,
            replace(me, rank=rank, world_size=world_size),
            timeout=deadline.left(_LEAST_SECONDS),
            hosted_at=location.address if location.is_hosted else "",
            problem=f"{problem} Rank {rank} found this first." if problem else "",
        )
        if generation is not None:
            hosts = hosts_of_generation(opened.store, generation, rank, world_size)
            return replace(opened, store=PrefixStore(f"lockstep/{generation}/group", opened.store)), hosts


def _report_duplicate(me: Announcement, location: StoreLocation, timeout: datetime.timedelta) -> str:
    """Report the worker of this world that serves this rank's port, if there is one; return its process as text."""
    other = connect_to_other(location, timeout)
    with contextlib.suppress(dist.DistNetworkError):  # it has just ended
        return "" if other is None else report_duplicate_rank(other, me)
    return ""


@contextlib.contextmanager
def _raising_first(problem: str) -> Iterator[None]:
    """Raise `problem`, if there is one, in place of a later error."""
    try:
        yield
    except GroupError as error:
        if problem:
            raise GroupError(problem) from error
        raise


# -- Making the default group, once all workers are known to be there --------------------------------------------------


def find_set_up(
    backend: str,
    store: Store,
    rank: int,
    hosts: GroupHosts,
    store_host: str,
    deadline: Deadline,
    *,
    is_ours: bool,
    check: bool | None,
) -> tuple[str, GroupSetUp]:
    """Set Gloo's interface (collective); on several hosts the returned backends may be others.

    `is_ours`: the backends were chosen here, and not by the caller.
    """
    backend = backend_on_hosts(backend, hosts, rank, is_chosen=is_ours)
    warn_of_nccl(backend, hosts, rank)
    if uses_gloo_anywhere(backend):
        choose_interface(store, rank, hosts, store_host, deadline.with_at_least(_LEAST_SECONDS))
    asked = Checking.PUBLISH if check is None else Checking.WAIT if check else Checking.OFF
    checking = asked if _decide_check(check, backend, rank, hosts) else Checking.OFF
    world_size = len(hosts.identities)
    if checking is Checking.OFF and backend_names(backend) == ["gloo"] and world_size > 1:
        checking = Checking.OFF if hosts.why_not_shared(range(world_size)) else Checking.EXPLAIN
    return backend, GroupSetUp(
        hosts=hosts, deadline=deadline.with_at_least(_LEAST_SECONDS), checking=checking, subgroups=asked
    )


@contextlib.contextmanager
def making_group(
    set_up: GroupSetUp | None, store: Store | None, rank: int, world_size: int, *, uses_gloo: bool
) -> Iterator[None]:
    """Pass hosts and deadline to the group that torch makes in this context; record and explain it (collective).

    `set_up` and `store`, None for a group without a store, are passed on; `uses_gloo`: torch makes a Gloo backend.
    """
    with (
        waiting_for_others("connecting the process group"),
        _network_explained(rank),
        contextlib.ExitStack() as until_made,
    ):
        if set_up is not None and store is not None:
            until_made.enter_context(setting_up(set_up))
            if uses_gloo and set_up.checking is Checking.OFF:
                members = GroupMembers(global_ranks=range(world_size))
                until_made.enter_context(gloo_connected_in_time(store, rank, members, set_up.deadline))
        yield
    if set_up is not None and set_up.hosts is not None and dist.GroupMember.WORLD is not None:
        remember_hosts(dist.GroupMember.WORLD, set_up.hosts)


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
        _LOGGER.info(  # nothing is wrong: who looks for the reason of a hang finds it
            "Calls of %s are not compared between ranks%s: ranks that make different calls may hang, or get wrong "
            "results. To compare them, which makes each call a little slower, set LOCKSTEP_CHECK=1 or pass check=True "
            "to init_process_group; LOCKSTEP_CHECK=0 suppresses this line. (LS118)",
            " and ".join(sorted(names)),
            "" if hosts.is_one_host else " on several hosts",
        )
    return is_cheap


@contextlib.contextmanager
def _network_explained(rank: int) -> Iterator[None]:
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


# -- Which backends it has: for the worker's device and the hosts of all -----------------------------------------------


@final
class ChosenBackend(str):
    """Backends that no caller has asked for: where ranks cannot share memory, Gloo carries CPU tensors instead."""

    __slots__ = ()


def choose_backend(device_id: torch.device | int | None = None) -> ChosenBackend:
    """Return the backends for this worker: shared memory, and where there is an accelerator its own beside it (local).

    LOCKSTEP_CPU_BACKEND=gloo replaces shared memory by Gloo. Without `device_id`, the accelerator of this host counts.
    """
    if isinstance(device_id, torch.device):
        kind = device_id.type
    else:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = "cpu" if found is None else found.type
    name = dist.Backend.default_device_backend_map.get(kind, "gloo")
    has_own = name != "gloo" and dist.is_backend_available(name)
    for_cpu = read_settings().cpu_backend()
    return ChosenBackend(f"cpu:{for_cpu},{kind}:{name}" if kind != "cpu" and has_own else for_cpu)


def backend_on_hosts(backend: str, hosts: GroupHosts, rank: int, *, is_chosen: bool) -> str:
    """Return the backends for ranks on these hosts: Gloo replaces shared memory beside an accelerator's backend."""
    reason = hosts.why_not_shared(range(len(hosts.identities)))
    if not reason or "," not in backend or "shm" not in backend_names(backend):
        return backend
    if rank == 0 and (hosts.is_one_host or not is_chosen):  # over several hosts it is what to expect
        say_not_shared(reason)
    return backend.lower().replace(":shm", ":gloo")


def warn_of_nccl(backend: str, hosts: GroupHosts, rank: int) -> None:
    if rank == 0 and "nccl" in backend_names(backend) and dist.is_nccl_available():
        text = explain_defects(
            torch.cuda.nccl.version()[:3], world_size=len(hosts.identities), is_one_host=hosts.is_one_host
        )
        if text:
            warnings.warn(text, stacklevel=stacklevel_of_user())


def own_device(backend: str, variables: WorldVariables) -> torch.device | None:
    """Return the accelerator that its backend is to use in this process, if it follows from the local rank (local)."""
    device = own_accelerator(variables.local_rank)
    name = None if device is None else dist.Backend.default_device_backend_map.get(device.type)
    return device if name != "gloo" and name in backend_names(backend) else None


def explain_missing_backend(backend: str) -> str:
    """Return which backend this torch lacks, or which device it cannot serve; empty if all are usable."""
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            public = set(dist.Backend.backend_list) - _INTERNAL
            known = ", ".join(sorted(known for known in public if dist.is_backend_available(known)))
            return f"This build of torch ({torch.__version__}) has no backend {name!r}; it has: {known}. (LS108)"
        if part.endswith(":shm") and part != "cpu:shm":
            return (
                f"The backend shm is for CPU tensors, but {part!r} uses it for others. "
                "Give 'cpu:shm,cuda:nccl'. (LS108)"
            )
    return ""


def explain_unshared(backend: str) -> str:
    """Return why this worker cannot take part in the shared memory that its caller asks for; empty if it can."""
    reason = why_alone() if "shm" in backend_names(backend) else ""
    return reason and (
        f"The backend shm cannot be used on host {socket.gethostname()!r}: {reason}. "
        "Without a backend, or with 'gloo', workers use Gloo. (LS108)"
    )


def explain_unusable(backend: str, variables: WorldVariables, device_id: torch.device | int | None) -> str:
    """Make the local rank's GPU current, unless one was chosen; return which GPU or interface is unusable, or empty."""
    if uses_gloo_anywhere(backend) and (problem := explain_wrong_interface()):
        return problem
    is_for_cpu = set(backend_names(backend)) <= _FOR_CPU
    if device_id is not None or is_for_cpu or not (variables.local_rank or "").isdecimal():
        return ""
    return take_gpu(int(variables.local_rank or 0))


def uses_gloo_anywhere(backend: str) -> bool:
    """Return whether Gloo is among the backends; shm uses it if the workers are on several hosts."""
    return "gloo" in backend.lower() or "shm" in backend.lower()


def backend_names(backend: str) -> list[str]:
    """Return the names of a group's backends: `["shm", "nccl"]` for `"cpu:shm,cuda:nccl"`."""
    return [part.rpartition(":")[2] for part in backend.lower().split(",")]
