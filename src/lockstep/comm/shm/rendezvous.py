"""How the ranks of a group come to share memory: rank 0 makes the file and hands it to each peer over a Unix socket.

    rank 0                                  store              every other rank r
    1 listens on an abstract socket
    2 publishes its host and address   ->   host/0
                                            host/r       <-    3 publishes its host
    4 all hosts read by all: one host, or the group is not made
                                                               5 connects, checks whose socket it is, says its rank
    6 checks whose process it is, notes its pid
    7 sends the file and the pids to all                       8 maps the file, watches the pids, says "ready"
    9 says "go" when all are ready                            10 closes the socket
    X leaves word why it gave up       ->   failed       <-    X asks why rank 0 is gone

The socket's name lives in the kernel alone, and both ends ask the kernel who is on the other one: another user of the
machine can neither join nor be joined.
"""

import array
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, Store

from lockstep.comm.shm import memory
from lockstep.comm.shm.host import host_identity
from lockstep.comm.shm.layout import Layout
from lockstep.errors import GroupError, PeerLostError

_READY = b"r"
_GO = b"g"
_FAILED = "failed"
_NUMBER = struct.Struct("<I")
_LONGER_SECONDS = 5.0
"""How much longer the others wait than rank 0, which knows who is missing and says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a rank has when all have met."""

    descriptor: int
    """The group's file."""
    pidfds: dict[int, int]
    """A descriptor of the process of every other rank, readable once it has ended."""
    pids: dict[int, int]
    """Its process id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Why the ranks cannot share memory."""

    reason: str
    """A clause, the same on every rank."""


def meet(store: Store, rank: int, layout: Layout, timeout: timedelta) -> Meeting | Apart:
    """Bring the ranks of a group together (collective).

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        layout: What the shared file looks like; it knows the number of ranks.
        timeout: How long to wait for the others.

    Raises:
        GroupError: Some rank did not come in time.
        PeerLostError: A rank came and was lost before all had met.
    """
    listener = _listen() if rank == 0 else None
    try:
        hosts = _exchange_hosts(store, rank, layout.size, listener, timeout)
        reason = _explain_apart([host for host, _ in hosts])
        if reason:
            return Apart(reason=reason)
        if listener is not None:
            return _receive_all(store, listener, layout, timeout)
        with _asking_why(store, timeout):
            return _join(hosts[0][1], rank, timeout)
    finally:
        if listener is not None:
            listener.close()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0lockstep-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _exchange_hosts(
    store: Store, rank: int, size: int, listener: socket.socket | None, timeout: timedelta
) -> list[tuple[str, str]]:
    address = listener.getsockname()[1:].decode("ascii") if listener is not None else ""
    keys = [f"host/{peer}" for peer in range(size)]
    try:
        store.set(keys[rank], json.dumps([host_identity(), address]))
        store.wait(keys, timeout)
        return [(str(host), str(where)) for host, where in (json.loads(store.get(key)) for key in keys)]
    except DistNetworkError as error:
        raise GroupError(
            "The store is gone: the process that holds it, rank 0 as a rule, ended while the group was being made. "
            f"Look at its log. torch said: {str(error).splitlines()[0]}"
        ) from error
    except RuntimeError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise GroupError(_explain_missing(missing, size, timeout)) from error


def _explain_missing(missing: Sequence[int], size: int, timeout: timedelta) -> str:
    return (
        f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {size} did not come to make the "
        f"group within {timeout.total_seconds():g} s. Every rank of the group must make it; look at the logs of those."
    )


def _explain_apart(hosts: Sequence[str]) -> str:
    for rank, host in enumerate(hosts):
        if host.startswith("alone"):
            return f"rank {rank} cannot share memory ({host.removeprefix('alone, ')})"
        if host != hosts[0]:
            return f"ranks 0 and {rank} are not on one host, or not in one container, or not of one user"
    return ""


@contextmanager
def _leaving_word(store: Store) -> Iterator[None]:
    """Tell the other ranks why rank 0 gives up, before it closes its sockets."""
    try:
        yield
    except (GroupError, OSError) as error:
        store.set(_FAILED, json.dumps([getattr(error, "rank", -1), str(error)]))
        raise


@contextmanager
def _asking_why(store: Store, timeout: timedelta) -> Iterator[None]:
    """Explain what goes wrong between this rank and rank 0."""
    try:
        yield
    except TimeoutError as error:
        raise GroupError(
            f"Rank 0 did not make the group within {timeout.total_seconds():g} s. Look at its log; it may be stuck."
        ) from error
    except (OSError, EOFError) as error:
        raise _explain_gone(store) from error


def _explain_gone(store: Store) -> GroupError:
    try:
        said = store.get(_FAILED) if store.check([_FAILED]) else b""
    except RuntimeError:  # the store is gone too
        said = b""
    if not said:
        return PeerLostError("Rank 0 ended while the group was being made.", rank=0)
    rank, message = json.loads(said)
    return GroupError(message) if rank < 0 else PeerLostError(message, rank=rank)


def _receive_all(store: Store, listener: socket.socket, layout: Layout, timeout: timedelta) -> Meeting:
    connections: dict[int, socket.socket] = {}
    pids: dict[int, int] = {0: os.getpid()}
    with ExitStack() as undo, ExitStack() as done, _leaving_word(store):
        descriptor = memory.create_file(layout)
        undo.callback(os.close, descriptor)
        deadline = time.monotonic() + timeout.total_seconds()
        while len(connections) < layout.size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                missing = [rank for rank in range(1, layout.size) if rank not in connections]
                raise GroupError(_explain_missing(missing, layout.size, timeout)) from error
            done.callback(connection.close)
            _admit(connection, connections, pids, timeout)
        hello = json.dumps([pids[rank] for rank in range(layout.size)]).encode()
        for rank, connection in connections.items():
            with _losing(rank):
                socket.send_fds(connection, [_NUMBER.pack(len(hello)) + hello], [descriptor])
        pidfds = _watch(pids, 0, undo)
        for rank, connection in connections.items():
            with _losing(rank):
                _expect(connection, _READY)
        for rank, connection in connections.items():
            with _losing(rank):
                connection.sendall(_GO)
        undo.pop_all()
    return Meeting(descriptor=descriptor, pidfds=pidfds, pids=pids)


def _admit(
    connection: socket.socket, connections: dict[int, socket.socket], pids: dict[int, int], timeout: timedelta
) -> None:
    """Note whose connection this is, or close it: it may be anybody's, and may say anything or nothing."""
    connection.settimeout(timeout.total_seconds())
    pid, uid = _who_is(connection)
    hello = b""
    if uid == os.geteuid():
        with suppress(OSError):
            hello = connection.recv(_NUMBER.size)
    rank = _NUMBER.unpack(hello)[0] if len(hello) == _NUMBER.size else 0
    if rank == 0 or rank in connections:
        connection.close()
        return
    connections[rank] = connection
    pids[rank] = pid


def _join(address: str, rank: int, timeout: timedelta) -> Meeting:
    with ExitStack() as undo, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout.total_seconds() + _LONGER_SECONDS)
        connection.connect(f"\0{address}")
        if _who_is(connection)[1] != os.geteuid():
            raise GroupError("The process that offers the group's shared memory belongs to another user: not joined.")
        connection.sendall(_NUMBER.pack(rank))
        length, descriptor = _receive_file(connection)
        undo.callback(os.close, descriptor)
        pids = dict(enumerate(json.loads(_receive_exactly(connection, length))))
        pidfds = _watch(pids, rank, undo)
        connection.sendall(_READY)
        _expect(connection, _GO)
        undo.pop_all()
    return Meeting(descriptor=descriptor, pidfds=pidfds, pids=pids)


def _receive_file(connection: socket.socket) -> tuple[int, int]:
    """Return a number and a descriptor that no program inherits: socket.recv_fds() drops the flag for that."""
    room = socket.CMSG_LEN(array.array("i").itemsize)
    data, control, _, _ = connection.recvmsg(_NUMBER.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return _NUMBER.unpack(data)[0], array.array("i", content)[0]
    raise EOFError


def _watch(pids: dict[int, int], own: int, undo: ExitStack) -> dict[int, int]:
    """Open a descriptor for every other process; each still holds its socket, so its number is not another's yet."""
    pidfds: dict[int, int] = {}
    for rank, pid in pids.items():
        if rank != own:
            with _losing(rank):
                pidfds[rank] = os.pidfd_open(pid)
            undo.callback(os.close, pidfds[rank])
    return pidfds


@contextmanager
def _losing(rank: int) -> Iterator[None]:
    """Take what goes wrong within for the loss of `rank`."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise PeerLostError(f"Rank {rank} was lost while the group was being made.", rank=rank) from error


def _who_is(connection: socket.socket) -> tuple[int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def _expect(connection: socket.socket, word: bytes) -> None:
    if _receive_exactly(connection, 1) != word:
        raise EOFError


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return received
