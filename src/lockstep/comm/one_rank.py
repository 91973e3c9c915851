"""Letting one rank do something for the others: whether this is the main one, and work done once on each host."""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import cast

import torch.distributed as dist
from torch.distributed import DistNetworkError, Store

from lockstep.comm.bootstrap.identity import find_rank_and_size
from lockstep.comm.bootstrap.process_group import join_world, launched_world
from lockstep.comm.calls import calls_for
from lockstep.comm.capabilities import ReportsExits, capabilities_of
from lockstep.comm.lost_ranks import EXIT_SECONDS
from lockstep.comm.objects import to_plain_error
from lockstep.comm.world import World, current_world
from lockstep.errors import GroupError
from lockstep.processes.host import boot_id
from lockstep.torch_private.groups import store_of

_LOGGER = logging.getLogger("lockstep")
_PAUSE_SECONDS = 0.05
_WARNING_SECONDS = 10.0


def is_main() -> bool:
    """Return whether this process is the one that prints and writes files for all: rank 0, or the only one (local).

        if ls.is_main():
            print("once, not once for each rank")

    Before there is a process group it is known from the variables of the launcher, such as torchrun's RANK.
    """
    world = current_world()
    launched = launched_world() if world.group is None else None
    if launched is None:
        return world.rank == 0
    rank, _ = find_rank_and_size(launched, None, -1, -1, has_store=False)
    return rank == 0


def barrier() -> None:
    """Wait until every rank of the default group is here; nothing where this process is the only one.

        if ls.is_main():
            torch.save(model.state_dict(), "model.pt")
        ls.barrier()
        state = torch.load("model.pt")

    Every rank must call it; if a launcher started this process and there is no group, this makes it. For work that
    takes longer than the timeout of the group, see `once_per_host`. Like `torch.distributed.barrier`.
    """
    if join_world().group is not None:
        dist.barrier()


def once_per_host(call: Callable[[], object]) -> None:
    """Let one rank of each host do something, such as a download, while the others wait as long as it takes.

        ls.once_per_host(lambda: download("data"))
        data = load("data")

    Every rank must call it; if a launcher started this process and there is no group, this makes it. The call happens
    on the first rank of each host, and on a process that is the only one. No timeout of the group applies to it, and
    a rank that ends meanwhile is reported to the others.

    Args:
        call: Called without arguments. What it returns is dropped: the ranks read what it has written.

    Raises:
        Exception: What the call raises, on the rank that made it; on the others PeerFailedError.
        PeerLostError: A rank has ended.
    """
    world = join_world()
    if world.group is None:
        call()
        return
    with calls_for("once_per_host"):
        places = world.gather_objects((boot_id(), socket.gethostname(), secrets.token_hex(8)))
    hosts = [(boot, name) for boot, name, _ in places]
    callers = sorted({hosts.index(host) for host in hosts})
    keys = [f"lockstep/once/{places[0][2]}/{rank}" for rank in callers]
    store = cast("Store", store_of(world.group))  # the default group has one
    failure: Exception | None = None
    try:
        if world.rank in callers:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - it is raised on every rank
                failure = error
            store.set(keys[callers.index(world.rank)], "done")
        _wait(world, store, dict(zip(callers, keys, strict=True)))
        failures = world.gather_objects(None if failure is None else to_plain_error(failure, world.rank))
        if failure is not None:
            raise failure
        for each in failures:
            if each is not None:
                raise each
    finally:
        failure = None  # its traceback has this frame: a cycle, which would keep what the frames hold


def _wait(world: World, store: Store, keys: Mapping[int, str]) -> None:
    """Wait until these ranks have set their keys; after a while the first that does not call logs which have not."""
    started, has_told = time.monotonic(), False
    while True:
        try:
            others = [rank for rank, key in keys.items() if not store.check([key])]
        except DistNetworkError as error:  # the rank that holds the store has ended, which is seen a moment later
            _raise_if_lost(world, seconds=EXIT_SECONDS)
            raise GroupError("The store of the process group is gone: rank 0, as a rule, has ended. (LS112)") from error
        if not others:
            return
        _raise_if_lost(world, seconds=0.0)
        if not has_told and time.monotonic() - started > _WARNING_SECONDS:
            has_told = True
            if world.rank == min(set(range(world.world_size)).difference(others)):
                _LOGGER.warning(
                    "Waiting for rank %s to end the call of once_per_host. (LS109)", ", ".join(map(str, others))
                )
        time.sleep(_PAUSE_SECONDS)


def _raise_if_lost(world: World, *, seconds: float) -> None:
    if world.group is None or not capabilities_of(world.group).reports_exits:
        return
    deadline = time.monotonic() + seconds
    while True:
        lost = cast("ReportsExits", world.group).find_lost(range(world.world_size))
        if lost is not None:
            raise lost
        if time.monotonic() >= deadline:
            return
        time.sleep(_PAUSE_SECONDS)
