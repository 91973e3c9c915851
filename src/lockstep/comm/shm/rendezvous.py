"""Sharing memory between the ranks of a group: rank 0 makes the file and sends it to each peer over a Unix socket.

    rank 0                                  store              every other rank r
    1 listens on an abstract socket
    2 publishes its host and address   ->   host/0
                                            host/r       <-    3 publishes its host
    4 all ranks read all hosts: one host, or the group is not made
                                                               5 connects, checks the user of the socket, sends its rank
    6 checks the user of the process, stores its pid
    7 sends the file and the pids to all                       8 maps the file, opens the pids, sends "ready"
    9 sends "go" when all are ready                           10 closes the socket
    X stores why it failed             ->   failed       <-    X reads why rank 0 has exited
    Y reads why rank r has exited      ->   left/r       <-    Y stores that it found another rank lost

The socket's name exists only in the kernel, and both ends ask the kernel for the user of the other one: processes of
other users cannot connect, and are not connected to.
"""

import array
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import Store

from lockstep.comm.hosts import (
    GroupHosts,
    GroupMembers,
    explain_missing,
    find_hosts,
    store_loss_explained,
    wait_for_members,
)
from lockstep.comm.shm import memory
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.stored_values import Deadline, read_record, read_texts, to_stored
from lockstep.errors import GroupError, PeerLostError
from lockstep.processes.host import open_process, peer_credentials

_READY = b"r"
_GO = b"g"
_ADDRESS = "address"
_FAILED = "failed"
_LEFT = "left/{}"
_NUMBER = struct.Struct("<I")
_LONGER_SECONDS = 5.0
"""How much longer the others wait than rank 0, which reports the missing ranks."""
_LOOK_SECONDS = 0.1
"""How often rank 0, while it waits for a rank, looks whether the group is still to be made."""
_GRACE_SECONDS = 1.0
"""The least time for a rank that has set its key in time to connect, and then to map the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandles:
    descriptor: int
    """The group's file."""
    pidfds: dict[int, int]
    """A descriptor of the process of every other rank, readable once it has ended."""
    pids: dict[int, int]


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
    listener = _listen() if rank == 0 else None
    try:
        with store_loss_explained():
            if listener is not None:
                store.set(_ADDRESS, json.dumps([listener.getsockname()[1:].decode("ascii")]))
            if hosts is None:
                hosts = find_hosts(store, rank, members, deadline)
            else:
                keys = [_ADDRESS, *(f"arrived/{peer}" for peer in range(1, layout.size))]
                if listener is None:
                    store.set(keys[rank], "yes")
                wait_for_members(store, keys, members, deadline)
            (address,) = read_texts(_ADDRESS, store.get(_ADDRESS), 1)  # set before rank 0 set its key
        reason = hosts.why_not_shared(members.global_ranks)
        if reason:
            return NotShared(reason=reason), hosts
        if listener is not None:
            return _receive_all(store, listener, layout, deadline, members.global_ranks), hosts
        with _loss_explained(members.global_ranks[0], store, _FAILED, how="ended"):
            try:
                return _join(store, address, rank, deadline, members.global_ranks), hosts
            except TimeoutError as error:
                raise GroupError(
                    f"Rank {members.global_ranks[0]} did not make the group within {deadline.limit.total_seconds():g} "
                    "s. Look at its log; it may be stuck. (LS109)"
                ) from error
    finally:
        if listener is not None:
            listener.close()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0lockstep-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


@contextmanager
def _publishing_reason(store: Store, key: str) -> Iterator[None]:
    """Store why this rank fails, for the others, before it closes its sockets."""
    try:
        yield
    except (GroupError, OSError) as error:
        with suppress(RuntimeError):  # the store is lost too
            store.set(key, to_stored(_Reason(rank=getattr(error, "rank", -1), message=str(error))))
        raise


def _read_reason(store: Store, key: str) -> GroupError | None:
    """Return why a rank failed, if it has stored a reason."""
    try:
        stored = store.get(key) if store.check([key]) else b""
    except RuntimeError:  # the store is lost too
        stored = b""
    if not stored:
        return None
    found = read_record(key, stored, _Reason)
    return GroupError(found.message) if found.rank < 0 else PeerLostError(found.message, rank=found.rank)


def _receive_all(
    store: Store, listener: socket.socket, layout: FileLayout, deadline: Deadline, global_ranks: Sequence[int]
) -> GroupHandles:
    connections: dict[int, socket.socket] = {}
    pids: dict[int, int] = {0: os.getpid()}

    def explained(rank: int) -> AbstractContextManager[None]:
        return _loss_explained(global_ranks[rank], store, _LEFT.format(rank))

    with ExitStack() as undo, ExitStack() as done, _publishing_reason(store, _FAILED):
        descriptor = memory.create_file(layout)
        undo.callback(os.close, descriptor)
        try:
            for rank, connection, pid in _accept_ranks(store, listener, layout.size, deadline, done):
                connections[rank], pids[rank] = connection, pid
        except TimeoutError as error:
            missing = [global_ranks[rank] for rank in range(1, layout.size) if rank not in connections]
            raise GroupError(explain_missing(missing, layout.size, deadline.limit)) from error
        hello = json.dumps([pids[rank] for rank in range(layout.size)]).encode()
        for rank, connection in connections.items():
            with explained(rank):
                socket.send_fds(connection, [_NUMBER.pack(len(hello)) + hello], [descriptor])
        pidfds = _watch(pids, 0, undo, global_ranks)
        for rank, connection in connections.items():
            connection.settimeout(deadline.seconds_left(_GRACE_SECONDS))
            with explained(rank):
                _expect(connection, _READY)
        for rank, connection in connections.items():
            with explained(rank):
                connection.sendall(_GO)
        undo.pop_all()
    return GroupHandles(descriptor=descriptor, pidfds=pidfds, pids=pids)


def _accept_ranks(
    store: Store, listener: socket.socket, size: int, deadline: Deadline, done: ExitStack
) -> Iterator[tuple[int, socket.socket, int]]:
    """Yield the connection and the process of each other rank.

    A connection may be from any process, and send anything or nothing: none is waited for by itself, and one that is no
    rank's is closed. `TimeoutError`: a rank is missing; `GroupError`: the launcher has given this group up.
    """
    missing = set(range(1, size))
    begun: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        end = time.monotonic() + deadline.seconds_left(_GRACE_SECONDS)
        while missing:
            ready = [key.fileobj for key, _ in selector.select(min(max(end - time.monotonic(), 0.0), _LOOK_SECONDS))]
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
                if rank not in missing:
                    connection.close()
                    continue
                missing.discard(rank)
                connection.settimeout(deadline.seconds_left(_GRACE_SECONDS))
                yield rank, connection, peer_credentials(connection)[0]
                end = time.monotonic() + deadline.seconds_left(_GRACE_SECONDS)
            if missing and time.monotonic() >= end:
                raise TimeoutError
            if not ready:
                with store_loss_explained():
                    store.check([_ADDRESS])


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


def _join(store: Store, address: str, rank: int, deadline: Deadline, global_ranks: Sequence[int]) -> GroupHandles:
    with ExitStack() as undo, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline.seconds_left() + _LONGER_SECONDS)
        connection.connect(f"\0{address}")
        if peer_credentials(connection)[1] != os.geteuid():
            raise GroupError("The process that offers the group's shared memory belongs to another user. (LS114)")
        connection.sendall(_NUMBER.pack(rank))
        length, descriptor = _receive_file(connection)
        undo.callback(os.close, descriptor)
        pids = dict(enumerate(json.loads(_receive_exactly(connection, length))))
        with _publishing_reason(store, _LEFT.format(rank)):
            pidfds = _watch(pids, rank, undo, global_ranks)
        connection.sendall(_READY)
        _expect(connection, _GO)
        undo.pop_all()
    return GroupHandles(descriptor=descriptor, pidfds=pidfds, pids=pids)


def _receive_file(connection: socket.socket) -> tuple[int, int]:
    """Return a number and a descriptor that no program inherits: socket.recv_fds() drops the flag for that."""
    room = socket.CMSG_LEN(array.array("i").itemsize)
    data, control, _, _ = connection.recvmsg(_NUMBER.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return _NUMBER.unpack(data)[0], array.array("i", content)[0]
    raise EOFError


def _watch(pids: dict[int, int], own: int, undo: ExitStack, global_ranks: Sequence[int]) -> dict[int, int]:
    """Open a descriptor for every other process; each still holds its socket, so its process id is not reused yet."""
    pidfds: dict[int, int] = {}
    for rank, pid in pids.items():
        if rank != own:
            with _loss_explained(global_ranks[rank]):
                pidfds[rank] = open_process(pid)
            undo.callback(os.close, pidfds[rank])
    return pidfds


@contextmanager
def _loss_explained(name: int, store: Store | None = None, key: str = "", how: str = "was lost") -> Iterator[None]:
    """Raise that the rank of this name was lost if its connection fails, or the reason that it has stored."""
    try:
        yield
    except (OSError, EOFError) as error:
        lost = PeerLostError(f"Rank {name} {how} while the group was being made. (LS112)", rank=name)
        raise (None if store is None else _read_reason(store, key)) or lost from error


def _expect(connection: socket.socket, expected: bytes) -> None:
    if _receive_exactly(connection, 1) != expected:
        raise EOFError


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return received
