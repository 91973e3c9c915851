"""The rendezvous of one host: a store on a loopback port that the kernel picks, so that launches never share a port.

For scripts that call torch's own `init_process_group`; what has Lockstep meets over channels. Only processes of this
user reach the store:

a worker  --port-->  forwarding: whose is it?  --guarded port-->  the store, in this process
a stranger --port--x closed at once
a stranger --guarded port--x dropped by the kernel

[Note: whose a connection is] Linux tells the user of each end that is on this host, in `/proc/net/tcp`.

[Note: the guard] A listening socket takes whoever connects. A filter (`SO_ATTACH_FILTER`, which needs no privilege)
drops packets before they reach it, by their content. Here it keeps the packets whose source port is one that this
process holds, and which no other process can send from therefore.
"""

import contextlib
import ctypes
import os
import pwd
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from lockstep.launch.output import print_message
from lockstep.launch.signals import wait_to_read
from lockstep.processes.host import NO_LOOPBACK, has_loopback, has_loopback_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_BACKLOG = 128
_PIECE_BYTES = 1 << 16
_NUM_ATTEMPTS = 20
"""How often to open the store anew, if others connect to its port before it is guarded."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    port: int
    is_served: bool
    """Whether the launcher serves the store; if not, rank 0 does."""


@contextmanager
def reserved_port() -> Iterator[socket.socket]:
    """Reserve a loopback port that the kernel picks, for a store that workers may open themselves.

    The socket is bound but does not listen, so no other program gets the port. A store can listen there while
    SO_REUSEADDR is set on this socket, also in a process that has inherited it; the store sets it on its own, too.
    """
    with socket.socket() as reserved:
        # Without such an address, as with IPv6 alone, no store can be opened; groups over channels need none.
        reserved.bind((LOOPBACK if has_loopback_address() else "", 0))
        yield reserved


@contextmanager
def open_rendezvous(num_workers: int) -> Iterator[Rendezvous]:
    """Keep the rendezvous of a script's workers open within the block.

    The launcher serves it from the first connection of its own user on; connections of other users are closed at once.
    So a launch whose workers never connect does not import torch, which takes a second and 150 MB.

    A single worker serves its store itself. If its script starts processes of its own (`torch.multiprocessing.spawn`),
    it makes a rendezvous for them, and with TORCHELASTIC_USE_AGENT_STORE they would expect that a launcher serves it.
    """
    if not has_loopback():
        print_message(f"lockstep: warning: {NO_LOOPBACK} Groups of shared memory work without it.")
    if num_workers == 1 or not has_loopback_address():
        with reserved_port() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # processes of the script do not inherit it
            yield Rendezvous(reserved.getsockname()[1], is_served=False)
        return
    with socket.create_server((LOOPBACK, 0), backlog=_BACKLOG) as listener:
        over, over_writer = os.pipe()
        rendezvous = Rendezvous(listener.getsockname()[1], is_served=True)
        serving = threading.Thread(target=_serve_when_asked, args=(listener, over), name="rendezvous")
        serving.start()
        try:
            yield rendezvous
        finally:
            os.close(over_writer)
            serving.join()
            os.close(over)


def _serve_when_asked(listener: socket.socket, over: int) -> None:
    """Pass on connections of this user to a store, from the first connection on, until `over` can be read."""
    if over in wait_to_read(listener.fileno(), over):
        return
    import asyncio  # not above: a launch whose workers never connect starts without it

    strangers: set[int] = set()

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one end is gone
            while piece := await source.read(_PIECE_BYTES):
                target.write(piece)
                await target.drain()

    async def forward(here: asyncio.StreamReader, to_here: asyncio.StreamWriter) -> None:
        with contextlib.closing(to_here):
            if not _is_let_in(to_here.get_extra_info("socket"), strangers):
                return
            try:
                there, to_there = await asyncio.open_connection(sock=store.connect())
            except OSError as error:
                print_message(f"error: The rendezvous of this launch cannot be served: {error}")
                return
            with contextlib.closing(to_there):
                ways = [asyncio.create_task(pass_on(*way)) for way in ((here, to_there), (there, to_here))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)

    async def serve() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(over, ended.set)
        server = await asyncio.start_server(forward, sock=listener)
        await ended.wait()
        server.close()

    with contextlib.closing(GuardedStore()) as store:
        asyncio.run(serve())


def _is_let_in(connection: socket.socket, strangers: set[int]) -> bool:
    try:
        is_own, user = is_own_connection(connection)
    except OSError:  # it was reset
        return False
    if user is not None and not is_own and user not in strangers:
        strangers.add(user)
        print_message(
            f"lockstep: warning: the user {_name_of(user)} has connected to the rendezvous of this launch, and was not "
            "let in."
        )
    return is_own


_SO_ATTACH_FILTER = 26
_LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x15, 0x06
"""Instructions: load two bytes of the packet, compare, keep as many bytes as the operand says."""
_SOURCE_PORT = 0
_WHOLE = 0xFFFFFFFF
_NUM_REMEMBERED = 128
"""The last packet of a handshake may come when the next connection is made already. A jump reaches 255 instructions."""


@final
class GuardedStore:
    """A TCPStore that only this process can connect to; it is opened at the first connection."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._listener = socket.socket()
        self._ports: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        self._is_guarded = False

    def close(self) -> None:
        self._store = None
        self._listener.close()

    def connect(self) -> socket.socket:
        """Return a connection to the store; `OSError` if it cannot be opened, or not before others have connected."""
        if self._store is None:
            self._store = self._open()
        connection = socket.socket()
        try:
            connection.bind((LOOPBACK, 0))
            self._ports.append(connection.getsockname()[1])
            if self._is_guarded:
                self._attach_filter()
            connection.connect(self._listener.getsockname())
        except OSError:
            connection.close()
            raise
        return connection

    def _open(self) -> "TCPStore":
        # torch's store makes a connection to itself, so its port can be guarded only after that. If another one was
        # made in between, this store is not used: it would be seen among the connections, or by a key that it has set.
        from torch.distributed import TCPStore

        for _ in range(_NUM_ATTEMPTS):
            self._listener.close()
            self._listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
            host, port = self._listener.getsockname()
            descriptor = self._listener.dup().detach()
            try:
                store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
            except RuntimeError as error:  # torch's errors, that of a socket among them
                reason = str(error).partition("\n")[0]
                raise OSError(f"torch could not open the store: {reason} (LS111)") from error
            self._is_guarded = self._close_to_all()
            if not self._is_guarded or (store.num_keys() == 0 and _count_connections((host, port)) == 1):
                return store
        raise OSError(
            f"Other processes connected {_NUM_ATTEMPTS} times to the store before its port was guarded. (LS111)"
        )

    def _close_to_all(self) -> bool:
        """Drop every packet from now on; return False where there is no such filter."""
        with contextlib.suppress(OSError):  # a sandbox whose kernel lacks it
            if sys.platform.startswith("linux"):
                self._attach_filter()
                return True
        return False

    def _attach_filter(self) -> None:
        num_ports = len(self._ports)
        program = [
            (_LOAD_HALF, 0, 0, _SOURCE_PORT),
            *((_JUMP_IF_EQUAL, num_ports - place, 0, port) for place, port in enumerate(self._ports)),
            (_RETURN, 0, 0, 0),
            (_RETURN, 0, 0, _WHOLE),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        self._listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code))
        )


def _count_connections(address: tuple[str, int]) -> int:
    """Return how many connections to a port there are or were a moment ago, as its end of them or as the other."""
    port = kernel_address(address)
    ends = [each for each in read_sockets() if port in {each.local, each.remote} and each.state != _LISTENING]
    return len({frozenset((each.local, each.remote)) for each in ends})


def _name_of(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} (id {user})"
    return f"of id {user}"


_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"
"""How the address of an IPv6 socket begins that is connected over IPv4, as those of torch are."""
_ESTABLISHED, _LISTENING = 1, 10
_LOCAL, _REMOTE, _STATE, _USER, _INODE = 1, 2, 3, 7, 9
"""Columns of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    local: str
    remote: str
    state: int
    user: int
    """The id of the user who made it; 0 also for one that is closed."""
    inode: int
    """0 where no process holds it."""


def kernel_address(address: tuple[str, int]) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def read_sockets() -> Iterator[TcpSocket]:
    """Yield the TCP sockets of this host; `OSError` where the kernel does not list them: this is not Linux."""
    first, *others = _TABLES
    texts = [first.read_text(), *(table.read_text() for table in others if table.exists())]  # a kernel without IPv6
    for line in (line for text in texts for line in text.splitlines()[1:]):
        fields = line.split()
        yield TcpSocket(
            local=fields[_LOCAL].removeprefix(_MAPPED),
            remote=fields[_REMOTE].removeprefix(_MAPPED),
            state=int(fields[_STATE], 16),
            user=int(fields[_USER]),
            inode=int(fields[_INODE]),
        )


def is_own_connection(connection: socket.socket) -> tuple[bool, int | None]:
    """Return whether a process of this user holds the other end of a connection over loopback, and whose it is.

    The user is None for an end that is closed already, which nobody needs to answer. Where the kernel does not tell,
    on other systems than Linux, every connection counts as the user's own.
    """
    peer, own = kernel_address(connection.getpeername()), kernel_address(connection.getsockname())
    try:
        found = [each for each in read_sockets() if each.local == peer and each.remote == own]
    except OSError:
        return True, os.getuid()
    found = [each for each in found if each.state == _ESTABLISHED and each.inode]  # else `user` is not who made it
    return (found[0].user == os.getuid(), found[0].user) if found else (False, None)
