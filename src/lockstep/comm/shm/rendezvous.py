"""Sharing memory between the ranks of a group: rank 0 makes the file and sends it to each peer over a Unix socket.

    rank 0                                     store         every other rank r
    1 listens on an abstract socket
    2 publishes its address                ->  address  ->   3 connects, checks the user of the socket, sends its rank
    4 checks the user of each process
    5 when all are there: sends the file, and
      who they are, to all                                   6 maps the file, opens the processes
    X stores why it failed                 ->  failed   ->   X reads why rank 0 has closed the connection

So each rank waits once. Whoever is lost after step 3 is lost in the group's first call, as if that came a moment later.

The socket's name exists only in the kernel, and both ends ask the kernel for the user of the other one: processes of
other users cannot connect, and are not connected to. A process is identified by its number and when it started.
"""

import array
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import Store

from lockstep.comm.hosts import (
    GroupHosts,
    GroupMembers,
    MembersWait,
    find_hosts,
    store_loss_explained,
    wait_for_members,
)
from lockstep.comm.shm import memory
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.stored_values import Deadline, read_record, read_texts, to_stored
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.host import open_process, peer_credentials, start_ticks

_ADDRESS = "address"
_FAILED = "failed"
_NUMBER = struct.Struct("<I")
_LONGER_SECONDS = 5.0
"""How much longer the others wait than rank 0, which reports the missing ranks."""
_LOOK_SECONDS = 0.1
"""How often a rank that waits for others looks whether the group is still to be made."""
_NEVER = -1
"""When a process has started that counts as ended."""
_GRACE_SECONDS = 1.0
"""The least time for the ranks to connect, and then for each to be sent the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandles:
    descriptor: int
    """The group's file."""
    pidfds: dict[int, int]
    """A descriptor of the process of every other rank, readable once it has ended."""
    pids: dict[int, int]


class _Process(NamedTuple):
    pid: int
    started: int
    """When, as `start_ticks` returns it: after its end its number may come to mean another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reason:
    rank: int
    """The rank that it has lost; -1 for another reason."""
    message: str


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
) -> tuple[GroupHandles | NotShared, GroupHosts]:
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
    if rank == 0:
        return _admit_all(store, layout, members, deadline), hosts
    return _join(store, rank, members, deadline), hosts


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0lockstep-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


@contextmanager
def _publishing_reason(store: Store) -> Iterator[None]:
    """Store why this rank fails, for the others, before it closes its sockets."""
    try:
        yield
    except (GroupError, OSError) as error:
        with suppress(RuntimeError):  # the store is lost too
            store.set(_FAILED, to_stored(_Reason(rank=getattr(error, "rank", -1), message=str(error))))
        raise


def _read_reason(store: Store) -> GroupError | None:
    """Return why rank 0 failed, if it has stored a reason."""
    try:
        stored = store.get(_FAILED) if store.check([_FAILED]) else b""
    except RuntimeError:  # the store is lost too
        stored = b""
    if not stored:
        return None
    found = read_record(_FAILED, stored, _Reason)
    return GroupError(found.message) if found.rank < 0 else PeerLostError(found.message, rank=found.rank)


def _admit_all(store: Store, layout: FileLayout, members: GroupMembers, deadline: Deadline) -> GroupHandles:
    processes = {0: _Process(os.getpid(), start_ticks(os.getpid()))}
    with ExitStack() as undo, ExitStack() as done, _publishing_reason(store):
        listener = done.enter_context(_listen())
        with store_loss_explained():
            store.set(_ADDRESS, json.dumps([listener.getsockname()[1:].decode("ascii")]))
        descriptor = memory.create_file(layout)
        undo.callback(os.close, descriptor)
        connections = _accept_ranks(store, listener, members, deadline.with_at_least(_GRACE_SECONDS), done)
        for rank, connection in connections.items():
            pid = peer_credentials(connection)[0]
            processes[rank] = _Process(pid, start_ticks(pid))
        hello = json.dumps([processes[rank] for rank in range(layout.size)]).encode()
        for rank, connection in connections.items():
            connection.settimeout(deadline.seconds_left(_GRACE_SECONDS))
            try:
                socket.send_fds(connection, [_NUMBER.pack(len(hello)) + hello], [descriptor])
            except OSError:  # it has left
                processes[rank] = processes[rank]._replace(started=_NEVER)
        handles = _watch(processes, 0, descriptor, undo)
        undo.pop_all()
    return handles


def _accept_ranks(
    store: Store, listener: socket.socket, members: GroupMembers, deadline: Deadline, done: ExitStack
) -> dict[int, socket.socket]:
    """Return the connection of each other rank.

    A connection may be from any process, and send anything or nothing: none is waited for by itself, and one that is no
    rank's is closed. `GroupError`: a rank is missing, or the launcher has given this group up.
    """
    connections: dict[int, socket.socket] = {}
    missing = dict(enumerate(members.global_ranks))
    del missing[0]
    begun: dict[socket.socket, bytes] = {}
    wait = MembersWait(members, deadline)
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing:
            ready = [key.fileobj for key, _ in selector.select(min(deadline.seconds_left(), _LOOK_SECONDS))]
            if listener in ready:
                with suppress(BlockingIOError):  # it was closed again
                    connection = listener.accept()[0]
                    if peer_credentials(connection)[1] == os.geteuid():
                        done.callback(connection.close)
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        begun[connection] = b""
                    else:
                        connection.close()
            for connection in [each for each in begun if each in ready]:
                rank = _read_rank(connection, begun)
                if rank is None:
                    continue
                del begun[connection]
                selector.unregister(connection)
                if missing.pop(rank, None) is None:
                    connection.close()
                else:
                    connections[rank] = connection
            if not ready or deadline.is_over:
                wait.look(lambda: [*missing.values()])
                with store_loss_explained():
                    store.check([_ADDRESS])
    return connections


def _read_rank(connection: socket.socket, begun: dict[socket.socket, bytes]) -> int | None:
    """Return the rank that a connection has sent, -1 if it is no rank's; None if more must come."""
    try:
        piece = connection.recv(_NUMBER.size - len(begun[connection]))
    except OSError:
        piece = b""
    if not piece:
        return -1
    begun[connection] += piece
    return _NUMBER.unpack(begun[connection])[0] if len(begun[connection]) == _NUMBER.size else None


def _join(store: Store, rank: int, members: GroupMembers, deadline: Deadline) -> GroupHandles:
    with store_loss_explained():
        wait_for_members(store, [_ADDRESS], members, deadline)
        (address,) = read_texts(_ADDRESS, store.get(_ADDRESS), 1)
    first = members.global_ranks[0]
    end = time.monotonic() + deadline.seconds_left() + _LONGER_SECONDS
    with ExitStack() as undo, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_LONGER_SECONDS)
        try:
            connection.connect(f"\0{address}")
            if peer_credentials(connection)[1] != os.geteuid():
                raise GroupError("The process that offers the group's shared memory belongs to another user. (LS114)")
            connection.sendall(_NUMBER.pack(rank))
            answer = select.poll()
            answer.register(connection, select.POLLIN)
            while not answer.poll(1000 * _LOOK_SECONDS):
                lost = members.find_lost()
                if lost is not None:
                    raise lost
                if time.monotonic() >= end:
                    raise GroupError(
                        f"Rank {first} did not make the group within {deadline.limit.total_seconds():g} s. Look at its "
                        "log; it may be stuck. (LS109)"
                    )
            length, descriptor = _receive_file(connection)
            undo.callback(os.close, descriptor)
            hello = _receive_exactly(connection, length)
        except (OSError, EOFError) as error:
            ended = PeerLostError(f"Rank {first} ended while the group was being made. (LS112)", rank=first)
            raise (_read_reason(store) or ended) from error
        processes = {rank: _Process(*found) for rank, found in enumerate(json.loads(hello))}
        handles = _watch(processes, rank, descriptor, undo)
        undo.pop_all()
    return handles


def _receive_file(connection: socket.socket) -> tuple[int, int]:
    """Return a number and a descriptor that no program inherits: socket.recv_fds() drops the flag for that."""
    room = socket.CMSG_LEN(array.array("i").itemsize)
    data, control, _, _ = connection.recvmsg(_NUMBER.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return _NUMBER.unpack(data)[0], array.array("i", content)[0]
    raise EOFError


def _watch(processes: Mapping[int, _Process], own: int, descriptor: int, undo: ExitStack) -> GroupHandles:
    """Open a descriptor for every other process; one that has ended is lost in the group's first call."""
    pidfds: dict[int, int] = {}
    for rank, process in processes.items():
        if rank != own:
            try:
                pidfds[rank] = open_process(*process)
            except ProcessLookupError:
                pidfds[rank] = os.eventfd(1)  # which can be read
            undo.callback(os.close, pidfds[rank])
    return GroupHandles(descriptor=descriptor, pidfds=pidfds, pids={rank: pid for rank, (pid, _) in processes.items()})


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return received
