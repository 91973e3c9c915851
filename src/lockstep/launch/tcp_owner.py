"""Whose a TCP connection is: Linux tells the user of each end that is on this host, in `/proc/net/tcp`."""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"
"""How the address of an IPv6 socket begins that is connected over IPv4, as those of torch are."""
_ESTABLISHED, _LISTENING = 1, 10
_LOCAL, _REMOTE, _STATE, _USER, _INODE = 1, 2, 3, 7, 9
"""Columns of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    local: str
    """Its own address, as `kernel_address` writes it."""
    remote: str
    state: int
    user: int
    """The id of the user who made it; 0 also for one that is closed."""
    inode: int
    """Its number; 0 if it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether it is connected, and a process holds it: only then `user` is who made it."""
        return self.state == _ESTABLISHED and self.inode != 0

    @property
    def is_listening(self) -> bool:
        return self.state == _LISTENING


def kernel_address(address: tuple[str, int]) -> str:
    """Return an IPv4 address and a port as the kernel writes them."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def read_sockets(tables: Sequence[Path] = _TABLES) -> Iterator[TcpSocket]:
    """Yield the TCP sockets of this host; `OSError` where the kernel does not list them: this is not Linux."""
    first, *others = tables
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
        found = [each for each in read_sockets() if each.local == peer and each.remote == own and each.is_open]
    except OSError:
        return True, os.getuid()
    return (found[0].user == os.getuid(), found[0].user) if found else (False, None)
