"""The connections of one Gloo group, found so that they can be shut down.

A call of Gloo ends when a connection that it needs ends. If a rank is killed, only the ranks that are connected to it
in this call notice. The others wait until one of these closes its connections, which Gloo does not do as long as
anything refers to a call that has failed; `abort` of torch's group does not do it either. So we shut the sockets down,
which ends the calls of all threads here and on the other ranks.

[Note: whose socket] Gloo does not tell which sockets are its own. But every rank has put the address where it listens
into the group's store, and every connection has one of these addresses at one end. The address is the group's alone.
Sockets are looked for when they are to be shut down, so connections that were made later are found too. A descriptor
is duplicated before it is looked at: another thread may close it and open another file under its number.

[Note: a connection that Gloo does not close] Gloo's thread closes a connection when it reads its end. If the next
message is for a receive that was given up (its call has failed, for another connection has ended), the thread leaves
the message where it is, and looks again and again: it never comes to the end. But a wait that times out closes all
connections of the group. So where one is still open after a moment, we wait a millisecond for a message that nobody
sends.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, final

import torch

from lockstep.errors import GroupError

_DESCRIPTORS: Final = "/proc/self/fd"
_CLOSE_SECONDS: Final = 20.0
"""How long Gloo's thread may take to close a connection that was shut down: milliseconds, unless it gets no time."""
_POLL_SECONDS: Final = 0.001
_MOMENT_SECONDS: Final = 0.02
"""How long Gloo's thread may take before a wait that times out closes the rest."""
_SHORTEST: Final = timedelta(milliseconds=1)
_UNUSED_TAG: Final = 0x4C6F636B
"""For a message that nobody sends."""
_IPV4: Final = struct.Struct("=H2s4s")
_IPV6: Final = struct.Struct("=H2s4s16s")


@final
class GlooSockets:
    """The connections of one group, found by what its ranks have `announced` in the store. [Note: whose socket]."""

    def __init__(self, backend: Any, announced: Sequence[bytes]) -> None:
        self._backend = backend
        self._announced = announced
        self._process = os.getpid()
        self._shut_down: set[str] = set()

    def shut_down(self) -> int:
        """End all connections (local, any thread); return how many there were.

        Nothing is done in a forked child: it has copies of its parent's descriptors.
        """
        if os.getpid() != self._process:
            return 0
        count = 0
        for connection in _open_sockets():
            with connection, suppress(OSError):  # the other end may have closed it meanwhile
                if self._is_own(connection):
                    self._shut_down.add(f"socket:[{os.fstat(connection.fileno()).st_ino}]")
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def wait_until_closed(self) -> None:
        """Return when Gloo has closed what was shut down: from then on nothing is received."""
        began = time.monotonic()
        has_timed_out = False
        while not self._shut_down.isdisjoint(target for _, target in _descriptors()):
            waited = time.monotonic() - began
            if waited > _MOMENT_SECONDS and not has_timed_out:
                has_timed_out = True
                self._close_by_timeout()
            if waited > _CLOSE_SECONDS:
                raise GroupError(
                    "Connections of the workers before are still open, so a message of theirs may still be received. "
                    "This run cannot continue with other workers. Resume it from a checkpoint. (LS602)"
                )
            time.sleep(_POLL_SECONDS)

    def _close_by_timeout(self) -> None:
        """See [Note: a connection that Gloo does not close]."""
        number = len(self._announced)  # Gloo has connections of each rank over each interface; a tag stands for one
        for interface in range(number):
            for peer in range(self._backend.size()):
                if peer != self._backend.rank():
                    with suppress(RuntimeError):  # this connection is closed, or the wait has timed out
                        tag = _UNUSED_TAG - _UNUSED_TAG % number + interface
                        self._backend.recv([torch.empty(1)], peer, tag).wait(_SHORTEST)

    def _is_own(self, connection: socket.socket) -> bool:
        if connection.type != socket.SOCK_STREAM or connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        ends = connection.getpeername(), connection.getsockname()  # the first fails for a socket that listens
        return any(pack_address(connection.family, end) in each for end in ends for each in self._announced)


def pack_address(family: int, address: tuple[object, ...]) -> bytes:
    """Return the beginning of an address as the kernel has it, and Gloo sends it: `struct sockaddr_in` or `_in6`."""
    host, port = str(address[0]).partition("%")[0], struct.pack("!H", address[1])
    packed = socket.inet_pton(family, host)
    return _IPV4.pack(family, port, packed) if family == socket.AF_INET else _IPV6.pack(family, port, bytes(4), packed)


def _open_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every socket of this process."""
    for number, target in _descriptors():
        if target.startswith("socket:"):
            with suppress(OSError):  # closed meanwhile
                yield socket.socket(fileno=os.dup(number))


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of this process and what each refers to; none where there is no /proc."""
    try:
        names = os.listdir(_DESCRIPTORS)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return
    for name in names:
        with suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115 - as above
