"""The launcher's end of the channels: one thread that serves the store, and sends workers what concerns them."""

import array
import contextlib
import fcntl
import os
import queue
import selectors
import socket
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from lockstep.channel.table import LineReader, Message, Table, encode
from lockstep.errors import GroupError, clause

_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _Connection:
    worker: int
    socket: socket.socket
    reader: LineReader = field(default_factory=LineReader)
    unsent: bytearray = field(default_factory=bytearray)


_Argument = socket.socket | threading.Event | Message | None


@final
class ChannelServer:
    """Serves the channels of the workers of one launch.

    A worker that does not read, because it is stopped, delays no other: what it has not read is kept for it.
    After an error of its thread the channels are closed, and `check`, `settle` and `take_reports` raise `GroupError`.
    """

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._report_reader, self._report_writer = _wake_pipe()
        self._commands: queue.SimpleQueue[tuple[str, int, _Argument]] = queue.SimpleQueue()
        self._table = Table()
        self._connections: dict[int, _Connection] = {}
        self._wake_reader, self._wake_writer = _wake_pipe()
        self._failure: Exception | None = None
        self._settling: threading.Event | None = None
        self._thread = threading.Thread(target=self._serve, name="channels", daemon=True)
        self._thread.start()

    @property
    def report_descriptor(self) -> int:
        """A descriptor that can be read when there are reports; `take_reports` empties it."""
        return self._report_reader

    def take_reports(self) -> list[tuple[int, Message]]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._report_reader, _PIECE_BYTES)
        self.check()
        return [self.reports.get() for _ in range(self.reports.qsize())]

    def check(self) -> None:
        if self._failure is not None:
            what = f"{type(self._failure).__name__}: {clause(self._failure)}"
            raise GroupError(
                f"The launcher can no longer talk to its workers, because of an error of its own: {what}. (LS602)"
            ) from self._failure

    @contextlib.contextmanager
    def worker_end(self, worker: int) -> Iterator[int]:
        """Make the channel of a worker; yield the descriptor that the worker inherits, open in this context only."""
        mine, theirs = socket.socketpair()
        with theirs:
            mine.setblocking(False)
            self._command("connect", worker, mine)
            yield theirs.fileno()

    def send(self, worker: int, message: Message) -> None:
        """Send a worker a message; nothing happens if it has ended."""
        self._command("send", worker, message)

    def settle(self) -> None:
        """Wait until all that workers have sent before now has been read, so that `take_reports` returns it."""
        settled = threading.Event()
        self._command("settle", 0, settled)
        settled.wait()  # the thread waits for no worker, and sets it also when it fails
        self.check()

    def close(self) -> None:
        self._command("close", 0, None)
        self._thread.join()
        for descriptor in (self._wake_reader, self._wake_writer, self._report_reader, self._report_writer):
            os.close(descriptor)

    def _command(self, what: str, worker: int, with_what: _Argument) -> None:
        self._commands.put((what, worker, with_what))
        if self._failure is None:
            _wake(self._wake_writer)
        else:
            self._refuse_commands()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                self._serve_until_closed(selector)
            except Exception as error:  # noqa: BLE001 - whoever uses this object raises it
                self._failure = error
                self._refuse_commands()
                _wake(self._report_writer)
                for connection in list(self._connections.values()):
                    self._drop(selector, connection)

    def _refuse_commands(self) -> None:
        if self._settling is not None:
            self._settling.set()
        with contextlib.suppress(queue.Empty):
            while True:
                _, _, argument = self._commands.get_nowait()
                if isinstance(argument, threading.Event):
                    argument.set()
                elif isinstance(argument, socket.socket):
                    argument.close()

    def _serve_until_closed(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._wake_reader, selectors.EVENT_READ, None)
        while True:
            for key, events in selector.select():
                connection: _Connection | None = key.data
                if connection is None:
                    os.read(self._wake_reader, _PIECE_BYTES)
                    if not self._carry_out(selector):
                        return
                    continue
                if events & selectors.EVENT_WRITE and self._is_open(connection):
                    self._flush(selector, connection)
                if events & selectors.EVENT_READ and self._is_open(connection):
                    self._receive(selector, connection)

    def _carry_out(self, selector: selectors.BaseSelector) -> bool:
        """Carry out the commands of other threads; return False if this one is to end."""
        while not self._commands.empty():
            what, worker, argument = self._commands.get()
            if what == "close":
                for connection in list(self._connections.values()):
                    self._drop(selector, connection)
                return False
            if isinstance(argument, threading.Event):
                self._settling = argument
                self._receive_all(selector)
                argument.set()
            elif isinstance(argument, socket.socket):
                self._connections[worker] = connection = _Connection(worker, argument)
                selector.register(argument, selectors.EVENT_READ, connection)
            elif isinstance(argument, dict):
                self._send(selector, worker, argument)
        return True

    def _receive_all(self, selector: selectors.BaseSelector) -> None:
        """Receive what has been sent until now, and no more: a worker may send without an end."""
        for connection in list(self._connections.values()):
            room = array.array("i", [0])
            fcntl.ioctl(connection.socket, termios.FIONREAD, room)
            while room[0] > 0 and self._is_open(connection):
                room[0] -= self._receive(selector, connection)

    def _receive(self, selector: selectors.BaseSelector, connection: _Connection) -> int:
        """Receive a piece; return how many bytes it has."""
        try:
            piece = connection.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            piece = b""
        if not piece:
            self._drop(selector, connection)
            return 0
        try:
            for message in connection.reader.feed(piece):
                if "report" in message:
                    self.reports.put((connection.worker, message))
                    _wake(self._report_writer)
                    continue
                for reply in self._table.answer(connection.worker, message):
                    self._send(selector, reply.worker, reply.message)
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # the user's code wrote to the descriptor
            self._send(selector, connection.worker, {"refused": f"{type(error).__name__}: {error}"})
            self._drop(selector, connection)
        return len(piece)

    def _send(self, selector: selectors.BaseSelector, worker: int, message: Message) -> None:
        connection = self._connections.get(worker)
        if connection is not None:
            connection.unsent += encode(message)
            self._flush(selector, connection)

    def _flush(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        try:
            while connection.unsent:
                num_sent = connection.socket.send(connection.unsent)
                del connection.unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(selector, connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        selector.modify(connection.socket, events, connection)

    def _is_open(self, connection: _Connection) -> bool:
        return self._connections.get(connection.worker) is connection

    def _drop(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        if not self._is_open(connection):
            return
        del self._connections[connection.worker]
        selector.unregister(connection.socket)
        connection.socket.close()
        self._table.forget(connection.worker)


def _wake_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def _wake(writer: int) -> None:
    with contextlib.suppress(BlockingIOError):  # the pipe is full: the other thread will wake in any case
        os.write(writer, b"!")
