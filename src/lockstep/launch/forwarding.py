"""Passing on connections, but only those of this user: what stands between a rendezvous and its port.

a worker  --port-->  forwarding: whose is it?  --guarded port-->  the store, in this process
a stranger --port--x closed at once
a stranger --guarded port--x dropped by the kernel
"""

import contextlib
import pwd
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from lockstep.launch.tcp_owner import is_own_connection

_PIECE_BYTES = 1 << 16
_MOST_UNSENT_BYTES = 1 << 20
"""From an end whose other end takes nothing, no more than this is read."""


@dataclass(slots=True, eq=False)
class _Side:
    socket: socket.socket
    other: "_Side | None" = None
    unsent: bytearray = field(default_factory=bytearray)
    has_closed: bool = False


@final
class Forwarding:
    """Accepts connections, and passes on those of this user (one thread), until `over` can be read.

    `connect` is called for each of them; where it raises an `OSError`, the connection is closed. `on_stranger` gets the
    name of each other user once.
    """

    def __init__(
        self,
        listener: socket.socket,
        over: int,
        connect: Callable[[], socket.socket],
        on_stranger: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._over = over
        self._connect = connect
        self._on_stranger = on_stranger
        self._strangers: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._listener.setblocking(False)
        with self._selector, contextlib.ExitStack() as stack:
            stack.callback(self._close_all)
            self._selector.register(self._over, selectors.EVENT_READ, None)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            while True:
                for key, events in self._selector.select():
                    if key.fileobj == self._over:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                        continue
                    end: _Side = key.data
                    if events & selectors.EVENT_READ:
                        self._receive(end)
                    if events & selectors.EVENT_WRITE:
                        self._flush(end)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it was closed again
            return
        try:
            is_own, user = is_own_connection(connection)
        except OSError:  # it was reset
            is_own, user = False, None
        if not is_own:
            connection.close()
            if user is not None and user not in self._strangers:
                self._strangers.add(user)
                self._on_stranger(_name_of(user))
            return
        try:
            here, there = _Side(connection), _Side(self._connect())
        except OSError:
            connection.close()
            return
        here.other, there.other = there, here
        for end in (here, there):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _receive(self, end: _Side) -> None:
        other = end.other
        if other is None:  # closed a moment ago
            return
        try:
            piece = end.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            end.has_closed = True
        other.unsent += piece
        self._flush(other)

    def _flush(self, end: _Side) -> None:
        """Send what this end takes now, and close both once the other end has closed and all is sent."""
        other = end.other
        if other is None:
            return
        try:
            while end.unsent:
                del end.unsent[: end.socket.send(end.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            end.unsent.clear()
            other.has_closed = True
        if other.has_closed and not end.unsent:
            self._close(end)
            return
        self._watch(end)
        self._watch(other)

    def _watch(self, end: _Side) -> None:
        """Wait for what concerns this end: there is room for what it sends, and there are bytes to send to it."""
        assert end.other is not None
        can_read = not end.has_closed and len(end.other.unsent) < _MOST_UNSENT_BYTES
        events = selectors.EVENT_READ * can_read | selectors.EVENT_WRITE * bool(end.unsent)
        is_watched = end.socket in self._selector.get_map()
        if not events:
            if is_watched:
                self._selector.unregister(end.socket)
        elif is_watched:
            self._selector.modify(end.socket, events, end)
        else:
            self._selector.register(end.socket, events, end)

    def _close(self, end: _Side) -> None:
        for each in (end, end.other):
            if each is not None:
                if each.socket in self._selector.get_map():
                    self._selector.unregister(each.socket)
                each.socket.close()
                each.other = None

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Side):
                self._close(key.data)


def _name_of(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} (id {user})"
    return f"of id {user}"
