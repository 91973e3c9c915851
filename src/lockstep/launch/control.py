"""The control socket of a launch: another program of the same user asks for more workers, or for fewer.

It is a Unix socket in the folder of the launch, open to its owner alone. The kernel says who connects; other users are
refused. A request is one JSON object in a line, and so are the answers:

    {"op": "describe"}                       ->  {"text": "3 workers: ..."}
    {"op": "resize", "workers": 3}           ->  {"text": "..."} as soon as it has begun, {"done": "..."} at its end
    {"op": "release", "device": "GPU2"}      ->  the same
                                                 {"error": "..."} where it cannot be done
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

from lockstep.channel.table import LineReader, Message, encode
from lockstep.processes.host import peer_credentials

if TYPE_CHECKING:  # the commands that connect need no workers
    from lockstep.launch.worker_pool import WorkerPool

CONTROL_NAME = ".control"
_PIECE_BYTES = 4096
_MOST_BYTES = 1 << 16
"""A request is not longer."""
_BACKLOG = 8


@final
class RefusedError(Exception):
    """A request cannot be carried out; the message says why, and what to do."""


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    reader: LineReader = field(default_factory=LineReader)
    num_bytes: int = 0
    waits: bool = False


@final
class ControlSocket:
    """Listens in a folder for requests; `OSError` if the folder cannot hold a socket.

    `begin` begins to carry out a request, and returns what it will do, or a question's answer. `result` returns how the
    last change has ended, None while it goes on. Both raise `RefusedError`.
    """

    def __init__(
        self, folder: Path, pool: "WorkerPool", begin: Callable[[Message], str], result: Callable[[], str | None]
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._begin = begin
        self._result = result
        self._clients: list[_Client] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # the mode of the file that `bind` makes, from its beginning
            with contextlib.suppress(FileNotFoundError):  # of a launcher that was killed: a run has one at a time
                (folder / CONTROL_NAME).unlink()
            with short_path(folder) as path:
                self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        pool.watch(self._listener.fileno(), self._accept)

    def tell(self) -> None:
        waiting = [client for client in self._clients if client.waits]
        if not waiting:
            return
        try:
            result = self._result()
            answer = None if result is None else {"done": result}
        except RefusedError as refused:
            answer = {"error": str(refused)}
        for client in waiting if answer is not None else ():
            client.waits = False
            self._send(client, answer or {})

    def close(self) -> None:
        """Remove the socket; tell those that wait that the run has ended. A second call does nothing."""
        if self._listener.fileno() < 0:
            return
        (self._folder / CONTROL_NAME).unlink(missing_ok=True)
        self._pool.forget(self._listener.fileno())
        self._listener.close()
        for client in list(self._clients):
            if client.waits:
                self._send(client, {"error": "The run has ended meanwhile."})
            self._drop(client)

    def _accept(self) -> bool:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has ended, or no descriptor is left for it: the run goes on
            return True
        if read_user(accepted) not in {os.geteuid(), 0}:
            accepted.close()
            return True
        accepted.setblocking(False)
        client = _Client(accepted)
        self._clients.append(client)
        self._pool.watch(accepted.fileno(), lambda: self._receive(client))
        return True

    def _receive(self, client: _Client) -> bool:
        try:
            piece = client.socket.recv(_PIECE_BYTES)
            client.num_bytes += len(piece)
            if not piece or client.num_bytes > _MOST_BYTES:
                raise ConnectionError
            for request in client.reader.feed(piece):
                self._answer(client, request)
        except BlockingIOError:
            return True
        except (OSError, ValueError, TypeError):  # it has ended, or it is not our client
            self._drop(client)
            return False
        return client in self._clients

    def _answer(self, client: _Client, request: Message) -> None:
        try:
            text = self._begin(request)
        except RefusedError as refused:
            self._send(client, {"error": str(refused)})
            return
        client.waits = request.get("op") != "describe"
        self._send(client, {"text": text})

    def _send(self, client: _Client, answer: Message) -> None:
        # An answer is small: it fits into the socket's buffer, or nobody reads.
        with contextlib.suppress(OSError):
            client.socket.send(encode(answer))

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._pool.forget(client.socket.fileno())
            client.socket.close()


def connect(folder: Path) -> socket.socket:
    """Connect to the launcher of the run in a folder; `OSError` without one, `PermissionError` for another user's."""
    client = socket.socket(socket.AF_UNIX)
    try:
        with short_path(folder) as path:
            client.connect(path)
        if read_user(client) not in {os.geteuid(), 0}:
            raise PermissionError(f"The process that listens in {folder} belongs to another user.")
    except OSError:
        client.close()
        raise
    return client


def ask(client: socket.socket, request: Message) -> Iterator[Message]:
    """Send a request and yield the answers, until the launcher closes the connection; `OSError` if it is lost."""
    client.sendall(encode(request))
    reader = LineReader()
    while piece := client.recv(_PIECE_BYTES):
        yield from reader.feed(piece)


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for its address, which has 108 bytes (Linux)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        proc = Path(f"/proc/self/fd/{descriptor}")
        yield str((proc if proc.exists() else folder) / CONTROL_NAME)
    finally:
        os.close(descriptor)


def read_user(connected: socket.socket) -> int:
    if not hasattr(socket, "SO_PEERCRED"):  # macOS: the file's mode alone decides who may connect
        return os.geteuid()
    return peer_credentials(connected)[1]
