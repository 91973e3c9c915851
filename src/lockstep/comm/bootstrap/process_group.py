"""Setting up and tearing down the process group, with torch's arguments and errors that name the remedy.

read settings -> open the store -> startup handshake -> find hosts   -> Gloo's interface -> torch makes the group
(here)           (store.py)        (handshake.py)       (../hosts.py)   (interface.py)      (group_making.py)
"""

import atexit
import contextlib
import datetime
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

# Now, because `lockstep.drop_in` binds torch's name to the function below.
from torch.distributed import init_process_group as make_torchs_group

from lockstep.comm.bootstrap.backends import choose_backend, explain_missing_backend, explain_unusable, own_device
from lockstep.comm.bootstrap.group_making import BackendChoice, find_set_up, making_group, waiting_for_others
from lockstep.comm.bootstrap.handshake import Announcement, report_duplicate_rank, run_handshake
from lockstep.comm.bootstrap.identity import find_world, is_announced, read_torch_variables
from lockstep.comm.bootstrap.inherited_channel import inherited_store
from lockstep.comm.bootstrap.rank_and_size import find_rank_and_size
from lockstep.comm.bootstrap.store import (
    OpenedStore,
    StoreLocation,
    connect_to_other,
    explain_port_in_use,
    find_store_location,
    open_store,
)
from lockstep.comm.hosts import GroupSetUp
from lockstep.comm.stored_values import Deadline
from lockstep.comm.world import World, current_world
from lockstep.doctor.stall_watch import record_this_worker
from lockstep.errors import GroupError
from lockstep.processes.ending import exit_quickly
from lockstep.processes.host import keep_temporary_files_in
from lockstep.settings import WorldVariables, read_settings
from lockstep.torch_private.groups import default_timeout

_LOGGER = logging.getLogger("lockstep")
_STORELESS = frozenset({"mpi", "fake"})
"""Backends that need no store: there can be no handshake."""
_REPORT_TIMEOUT = datetime.timedelta(seconds=20)
"""How long a worker that cannot take part tries to report that to the others: connecting to a store may take 5 s
or more if no name server answers."""
_DUPLICATE_TIMEOUT = datetime.timedelta(seconds=7)
"""How long the program that has rank 0's port may take to answer as a store: when torch connects, it looks up
the name of the address, which alone takes 5 s if the name server does not answer."""
_LEAST_SECONDS = 1.0
"""The shortest timeout of each later step of the set-up."""
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
    backend = choose_backend(device_id) if backend is None else backend
    is_env = store is None and (init_method or "env://").startswith("env://")
    environment = read_settings()
    variables = (find_world if is_env else read_torch_variables)(environment.launchers())
    problem = explain_missing_backend(backend) or explain_unusable(backend, variables, device_id)
    check = environment.check() if check is None else check
    with _raising_first(problem):
        rank, world_size = find_rank_and_size(variables, init_method, rank, world_size, has_store=store is not None)
    set_up: GroupSetUp | None = None
    if backend.lower() not in _STORELESS:
        asked = ",".join(sorted(backend.lower().split(","))) + ("" if check is None else f" with check={check}")
        settings = _OwnRequest(rank=rank, world_size=world_size, backend=asked, problem=problem)
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
            opened = _open_and_handshake(settings, location, deadline)
        choice = BackendChoice(backend=backend, is_ours=is_ours, check=check)
        backend, set_up = find_set_up(choice, opened, location, deadline)
        init_method, store, rank, world_size = None, opened.store, opened.rank, opened.world_size
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
        atexit.register(destroy_process_group)
    return current_world()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Tear down `group`, or the default group and with it all others; calling it again does nothing (local)."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnRequest:
    rank: int
    world_size: int
    backend: str
    problem: str
    """Why it cannot take part; empty if it can."""


def _open_and_handshake(settings: _OwnRequest, location: StoreLocation, deadline: Deadline) -> OpenedStore:
    """Connect to the other workers (collective); return rank, world size and a store for this group alone."""
    while True:
        with _raising_first(settings.problem):
            opened = open_store(location, settings.rank, settings.world_size, deadline.left(_LEAST_SECONDS))
            if opened is None:
                limit = min(deadline.left(_LEAST_SECONDS), _DUPLICATE_TIMEOUT)
                raise GroupError(explain_port_in_use(location, _report_duplicate(settings, location, limit)))
        if location.store is None:
            opened.store.set_timeout(deadline.limit)
        generation = run_handshake(
            opened.store,
            _announce(settings, opened.rank, opened.world_size),
            timeout=deadline.left(_LEAST_SECONDS),
            hosted_at=location.address if location.is_hosted else "",
            problem=f"{settings.problem} Rank {opened.rank} found this first." if settings.problem else "",
        )
        if generation is not None:
            own = PrefixStore(f"lockstep/{generation}/group", opened.store)
            return OpenedStore(store=own, rank=opened.rank, world_size=opened.world_size)


def _report_duplicate(settings: _OwnRequest, location: StoreLocation, timeout: datetime.timedelta) -> str:
    """Report the worker of this world that serves this rank's port, if there is one; return its process as text."""
    other = connect_to_other(location, timeout)
    with contextlib.suppress(dist.DistNetworkError):  # it has just ended
        return (
            ""
            if other is None
            else report_duplicate_rank(other, _announce(settings, settings.rank, settings.world_size))
        )
    return ""


def _announce(settings: _OwnRequest, rank: int, world_size: int) -> Announcement:
    return Announcement(
        rank=rank,
        world_size=world_size,
        backend=settings.backend,
        process=f"process {os.getpid()} on host {socket.gethostname()}",
        token=f"{_TOKEN}-{os.getpid()}",  # a forked child has its parent's first half
    )


@contextlib.contextmanager
def _raising_first(problem: str) -> Iterator[None]:
    """Raise `problem`, if there is one, in place of a later error."""
    try:
        yield
    except GroupError as error:
        if problem:
            raise GroupError(problem) from error
        raise
