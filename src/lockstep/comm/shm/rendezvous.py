"""Sharing memory between the ranks of a group: rank 0 makes the file, the others open it in `/proc/PID/fd` of rank 0.

    rank 0                                       store      every other rank r
    1 makes the file
    2 stores its process and its descriptor  ->  file  ->   3 opens the file, checks whose it is
    4 writes its process on a page of the file, adds to the counter of ranks there          4 the same
    5 when all have: opens the processes                                                    5 the same

So no rank goes on, and may end, before all have the file. Whoever is lost after step 4 is lost in the group's first
call, as if that came a moment later.

The kernel lets no process of another user open the file, and a rank opens none of another user: whoever can write into
the store reaches no memory by it.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import Store

from lockstep.comm.hosts import (
    GroupHosts,
    GroupMembers,
    MembersWait,
    find_hosts,
    store_loss_explained,
    wait_for_members,
)
from lockstep.comm.lost_ranks import ProcessEnds, RankProcess
from lockstep.comm.shm import native
from lockstep.comm.shm.file_layout import PAGE, FileLayout
from lockstep.comm.shm.memory import Memory, create_file, open_file, read_text, write_text
from lockstep.comm.stored_values import Deadline, read_record, to_stored
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.host import start_ticks

_FILE: Final = "file"
_HERE: Final = "the host of all"
_MOST_BYTES: Final = PAGE // 2
_LOOK_NS: Final = 50_000_000
"""How often a rank that waits for others looks whether the group is still to be made."""
_GRACE_SECONDS: Final = 1.0
"""The least time for the ranks to open the file, where all have come in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfferedFile:
    pid: int
    started: int
    """When the process of rank 0 started, as `start_ticks` returns it."""
    descriptor: int
    """Rank 0's descriptor of the file."""
    problem: str = ""
    """Why rank 0 has given the group up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotShared:
    reason: str
    """A clause, the same on every rank."""


def connect_ranks(
    store: Store,
    rank: int,
    layout: FileLayout,
    deadline: Deadline,
    members: GroupMembers | None = None,
    hosts: GroupHosts | None = None,
) -> tuple[tuple[Memory, ProcessEnds] | NotShared, GroupHosts]:
    """Connect the ranks of a group through shared memory (collective); return the hosts of the ranks too.

    `store` is for this group alone; `hosts` are given on all ranks or on none. Without `members`, a rank is its name.
    """
    members = members or GroupMembers(global_ranks=range(layout.size))
    if not 0 <= rank < layout.size:
        raise GroupError(
            f"Rank {rank} is outside a group of {layout.size}: ranks are 0 to {layout.size - 1}. Give each process its "
            "own rank, and as world_size the number of processes. (LS102)"
        )
    if hosts is None:
        hosts = find_hosts(store, rank, members, deadline)
    reason = hosts.why_not_shared(members.global_ranks)
    if reason:
        return NotShared(reason=reason), hosts
    with store_loss_explained():
        try:
            return _share_file(store, rank, layout, members, deadline.with_at_least(_GRACE_SECONDS)), hosts
        except (GroupError, OSError) as error:
            if rank == 0:
                with suppress(RuntimeError):  # the store is lost too
                    store.set(_FILE, to_stored(_OfferedFile(pid=-1, started=0, descriptor=-1, problem=str(error))))
            raise


def _share_file(
    store: Store, rank: int, layout: FileLayout, members: GroupMembers, deadline: Deadline
) -> tuple[Memory, ProcessEnds]:
    own = RankProcess(place=_HERE, pid=os.getpid(), started=start_ticks(os.getpid()))
    watched = [own]
    with ExitStack() as undo:
        if rank == 0:
            shared = Memory(create_file(layout), layout, rank)
            offered = _OfferedFile(pid=own.pid, started=own.started, descriptor=shared.descriptor)
            store.set(_FILE, to_stored(offered))
        else:
            wait_for_members(store, [_FILE], members, deadline)
            offered = read_record(_FILE, store.get(_FILE), _OfferedFile)
            watched.append(RankProcess(place=_HERE, pid=offered.pid, started=offered.started))
            shared = Memory(_open_file(store, offered, layout, members), layout, rank)
        undo.callback(shared.close)
        pages = [shared.address + layout.call(peer, 1) for peer in range(layout.size)]  # which the second phase writes
        write_text(pages[rank], to_stored(own).encode(), _MOST_BYTES)
        native.load().lockstep_raise(shared.address + layout.joined)
        with closing(ProcessEnds(watched, 0)) as first:

            def find_lost() -> GroupError | None:
                store.check([_FILE])  # an error where the store is lost, or the launcher has given this group up
                return members.find_lost() if first.find_ended() is None else _explain_first(store, members)

            others = GroupMembers(global_ranks=members.global_ranks, find_lost=find_lost)
            _wait_for_all(shared, pages, MembersWait(others, deadline), members)
        found = [
            read_record(f"process/{peer}", read_text(page, _MOST_BYTES), RankProcess) for peer, page in enumerate(pages)
        ]
        ends = ProcessEnds(found, rank)
        undo.pop_all()
    return shared, ends


def _wait_for_all(shared: Memory, pages: Sequence[int], wait: MembersWait, members: GroupMembers) -> None:
    counter, stop = shared.address + shared.layout.joined, ctypes.c_int32(0)

    def find_missing() -> list[int]:
        named = zip(members.global_ranks, pages, strict=True)
        return [name for name, page in named if not read_text(page, _MOST_BYTES)]

    while not native.load().lockstep_wait(counter, len(pages), 0, _LOOK_NS, ctypes.addressof(stop)):
        wait.look(find_missing)


def _open_file(store: Store, offered: _OfferedFile, layout: FileLayout, members: GroupMembers) -> int:
    try:
        return open_file(Path(f"/proc/{offered.pid}/fd/{offered.descriptor}"), layout)
    except PermissionError as error:
        raise GroupError(
            f"The group's shared memory cannot be opened: {error}. The process that offers it belongs to another user, "
            "or a sandbox lets no process open the files of others; then set LOCKSTEP_CPU_BACKEND=gloo. (LS114)"
        ) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _explain_first(store, members) from error


def _explain_first(store: Store, members: GroupMembers) -> GroupError:
    """Return why rank 0 does not make the group: what it has said, or that it has ended without a word."""
    problem = read_record(_FILE, store.get(_FILE), _OfferedFile).problem
    first = members.global_ranks[0]
    ended = PeerLostError(f"Rank {first} ended while the group was being made. (LS112)", rank=first)
    return GroupError(problem) if problem else ended
