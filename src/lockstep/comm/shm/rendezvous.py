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
    Y asks why rank r is gone          ->   left/r       <-    Y leaves word that it saw another one lost

The socket's name lives in the kernel alone, and both ends ask the kernel who is on the other one: another user of the
machine can neither join nor be joined.
"""

import array
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import DistNetworkError, Store

from lockstep.comm.shm import memory
from lockstep.comm.shm.file_layout import FileLayout
from lockstep.comm.shm.host import host_identity
from lockstep.errors import GroupError, PeerLostError

_LOGGER = logging.getLogger("lockstep")
_READY = b"r"
_GO = b"g"
_FAILED = "failed"
_LEFT = "left/{}"
_NUMBER = struct.Struct("<I")
_LONGER_SECONDS = 5.0
"""How much longer the others wait than rank 0, which knows who is missing and says so."""
_FIRST_PAUSE_SECONDS = 0.0005
_LAST_PAUSE_SECONDS = 0.05
"""How often who waits for others looks whether they have come or are lost: often at first, when they are about to."""
_WARNING_SECONDS = 10.0
"""After how long who waits says for whom."""


def _nobody() -> None:
    """Find nobody lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """Who the ranks of a group are."""

    names: Sequence[int]
    """What messages call them: their ranks in the default group."""
    find_lost: Callable[[], PeerLostError | None] = _nobody
    """Return the error for a member that is known to be lost, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandles:
    """What a rank has when all have met."""

    descriptor: int
    """The group's file."""
    pidfds: dict[int, int]
    """A descriptor of the process of every other rank, readable once it has ended."""
    pids: dict[int, int]
    """Its process id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotShared:
    """Why the ranks cannot share memory."""

    reason: str
    """A clause, the same on every rank."""


def connect_ranks(
    store: Store, rank: int, layout: FileLayout, timeout: timedelta, members: GroupMembers | None = None
) -> GroupHandles | NotShared:
    """Bring the ranks of a group together (collective).

    Args:
        store: A store of this group alone.
        rank: Number of this process in the group.
        layout: What the shared file looks like; it knows the number of ranks.
        timeout: How long to wait for the others.
        members: Who they are; None if they have no names but their numbers.

    Raises:
        GroupError: Some rank did not come in time, or there is no such rank.
        PeerLostError: A rank was lost before all had met.
    """
    members = members or GroupMembers(names=range(layout.size))
    if not 0 <= rank < layout.size:
        raise GroupError(
            f"Rank {rank} is outside a group of {layout.size}: ranks are 0 to {layout.size - 1}. Give each process its "
            "own rank, and as world_size the number of processes."
        )
    listener = _listen() if rank == 0 else None
    try:
        hosts = _exchange_hosts(store, rank, members, listener, timeout)
        reason = _explain_apart([host for host, _ in hosts], members.names)
        if reason:
            return NotShared(reason=reason)
        if listener is not None:
            return _receive_all(store, listener, layout, timeout, members.names)
        with _explaining_lost_root(store, timeout, members.names):
            return _join(store, hosts[0][1], rank, timeout, members.names)
    finally:
        if listener is not None:
            listener.close()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0lockstep-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _exchange_hosts(
    store: Store, rank: int, members: GroupMembers, listener: socket.socket | None, timeout: timedelta
) -> list[tuple[str, str]]:
    address = listener.getsockname()[1:].decode("ascii") if listener is not None else ""
    keys = [f"host/{peer}" for peer in range(len(members.names))]
    try:
        store.set(keys[rank], json.dumps([host_identity(), address]))
        _await(store, keys, members, timeout)
        return [(str(host), str(where)) for host, where in (json.loads(store.get(key)) for key in keys)]
    except DistNetworkError as error:
        raise GroupError(
            "The store is gone: the process that holds it, rank 0 as a rule, ended while the group was being made. "
            f"Look at its log. torch said: {str(error).splitlines()[0]}"
        ) from error


def _await(store: Store, keys: Sequence[str], members: GroupMembers, timeout: timedelta) -> None:
    """Wait until all have come; after a while say who has not."""
    started = time.monotonic()
    pause = _FIRST_PAUSE_SECONDS
    has_spoken = False
    # Not `store.wait` with a short timeout: torch prints a warning each time that one is over.
    while not store.check(list(keys)):
        waited = time.monotonic() - started
        is_over = waited >= timeout.total_seconds()
        lost = members.find_lost()
        if lost is not None:
            raise lost
        if is_over or (waited > _WARNING_SECONDS and not has_spoken):
            has_spoken = True
            missing = [name for name, key in zip(members.names, keys, strict=True) if not store.check([key])]
            if missing and is_over:
                raise GroupError(_explain_missing(missing, len(keys), timeout))
            if missing:
                _LOGGER.warning(
                    "Waiting for %s to make a group of ranks %s. Every rank of the group must make it.",
                    _name_ranks(missing),
                    ", ".join(map(str, members.names)),
                )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _explain_missing(missing: Sequence[int], size: int, timeout: timedelta) -> str:
    return (
        f"{_name_ranks(missing).capitalize()} of {size} did not come to make the "
        f"group within {timeout.total_seconds():g} s. Every rank of the group must make it; look at the logs of those."
    )


def _explain_apart(hosts: Sequence[str], names: Sequence[int]) -> str:
    for rank, host in enumerate(hosts):
        if host.startswith("alone"):
            return f"rank {names[rank]} cannot share memory ({host.removeprefix('alone, ')})"
        if host != hosts[0]:
            both = f"ranks {names[0]} and {names[rank]}"
            return f"{both} are not on one host, or not in one container, or not of one user"
    return ""


@contextmanager
def _publishing_reason(store: Store, key: str) -> Iterator[None]:
    """Tell the other ranks why this one gives up, before it closes its sockets."""
    try:
        yield
    except (GroupError, OSError) as error:
        with suppress(RuntimeError):  # the store is gone too
            store.set(key, json.dumps([getattr(error, "rank", -1), str(error)]))
        raise


@contextmanager
def _explaining_lost_root(store: Store, timeout: timedelta, names: Sequence[int]) -> Iterator[None]:
    """Explain what goes wrong between this rank and rank 0."""
    try:
        yield
    except TimeoutError as error:
        raise GroupError(
            f"Rank {names[0]} did not make the group within {timeout.total_seconds():g} s. Look at its log; it may be "
            "stuck."
        ) from error
    except (OSError, EOFError) as error:
        raise _explain_gone(store, names[0]) from error


def _explain_gone(store: Store, name: int) -> GroupError:
    ended = PeerLostError(f"Rank {name} ended while the group was being made.", rank=name)
    return _read_reason(store, _FAILED) or ended


def _read_reason(store: Store, key: str) -> GroupError | None:
    """Return why a rank gave up, if it has left word."""
    try:
        said = store.get(key) if store.check([key]) else b""
    except RuntimeError:  # the store is gone too
        said = b""
    if not said:
        return None
    rank, message = json.loads(said)
    return GroupError(message) if rank < 0 else PeerLostError(message, rank=rank)


def _receive_all(
    store: Store, listener: socket.socket, layout: FileLayout, timeout: timedelta, names: Sequence[int]
) -> GroupHandles:
    connections: dict[int, socket.socket] = {}
    pids: dict[int, int] = {0: os.getpid()}
    with ExitStack() as undo, ExitStack() as done, _publishing_reason(store, _FAILED):
        descriptor = memory.create_file(layout)
        undo.callback(os.close, descriptor)
        deadline = time.monotonic() + timeout.total_seconds()
        while len(connections) < layout.size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                missing = [names[rank] for rank in range(1, layout.size) if rank not in connections]
                raise GroupError(_explain_missing(missing, layout.size, timeout)) from error
            done.callback(connection.close)
            _admit(connection, connections, pids, timeout)
        hello = json.dumps([pids[rank] for rank in range(layout.size)]).encode()
        for rank, connection in connections.items():
            with _losing(names[rank], partial(_read_reason, store, _LEFT.format(rank))):
                socket.send_fds(connection, [_NUMBER.pack(len(hello)) + hello], [descriptor])
        pidfds = _watch(pids, 0, undo, names)
        for rank, connection in connections.items():
            with _losing(names[rank], partial(_read_reason, store, _LEFT.format(rank))):
                _expect(connection, _READY)
        for rank, connection in connections.items():
            with _losing(names[rank], partial(_read_reason, store, _LEFT.format(rank))):
                connection.sendall(_GO)
        undo.pop_all()
    return GroupHandles(descriptor=descriptor, pidfds=pidfds, pids=pids)


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


def _join(store: Store, address: str, rank: int, timeout: timedelta, names: Sequence[int]) -> GroupHandles:
    with ExitStack() as undo, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout.total_seconds() + _LONGER_SECONDS)
        connection.connect(f"\0{address}")
        if _who_is(connection)[1] != os.geteuid():
            raise GroupError("The process that offers the group's shared memory belongs to another user: not joined.")
        connection.sendall(_NUMBER.pack(rank))
        length, descriptor = _receive_file(connection)
        undo.callback(os.close, descriptor)
        pids = dict(enumerate(json.loads(_receive_exactly(connection, length))))
        with _publishing_reason(store, _LEFT.format(rank)):
            pidfds = _watch(pids, rank, undo, names)
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


def _watch(pids: dict[int, int], own: int, undo: ExitStack, names: Sequence[int]) -> dict[int, int]:
    """Open a descriptor for every other process; each still holds its socket, so its number is not another's yet."""
    pidfds: dict[int, int] = {}
    for rank, pid in pids.items():
        if rank != own:
            with _losing(names[rank]):
                pidfds[rank] = os.pidfd_open(pid)
            undo.callback(os.close, pidfds[rank])
    return pidfds


@contextmanager
def _losing(name: int, ask_why: Callable[[], GroupError | None] = _nobody) -> Iterator[None]:
    """Take what goes wrong within for the loss of the rank of this name, or for what it has left word of."""
    try:
        yield
    except (OSError, EOFError) as error:
        lost = PeerLostError(f"Rank {name} was lost while the group was being made.", rank=name)
        raise ask_why() or lost from error


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
