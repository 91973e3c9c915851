"""A worker's end of its channel to the launcher."""

import itertools
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from lockstep.channel.table import LineReader, Message, encode
from lockstep.processes.forking import call_in_children

_PIECE_BYTES = 1 << 16
_CLOSED: Message = {"closed": True}
_ABANDONED: Message = {"abandoned": True}


class ChannelClosedError(OSError):
    """The launcher has ended, this process is not the worker that the channel belongs to, or a request was given up."""


@final
class Channel:
    """A worker's channel; any thread may use it. It owns `descriptor`; `on_event` is called in the reading thread."""

    def __init__(self, descriptor: int, on_event: Callable[[Message], None]) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._on_event = on_event
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._answers: dict[int, tuple[object, queue.SimpleQueue[Message]]] = {}
        self._is_open = True
        self._end = "The launcher has ended."
        self._kept: list[object] = []
        self._abandoned: weakref.WeakSet[object] = weakref.WeakSet()
        threading.Thread(target=self._read, name="channel", daemon=True).start()
        call_in_children(self._close_in_child)

    def request(self, user: object, operation: str, seconds: float | None = None, **fields: Any) -> Any:
        """Send a request to the launcher and return its answer; wait for ever where `seconds` is None.

        `ChannelClosedError`: the launcher has ended, or `user` was abandoned. `TimeoutError`: no answer came in time.
        """
        number = next(self._numbers)
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers[number] = user, answers
        try:
            if user in self._abandoned:
                raise ChannelClosedError("The group was given up while it was being made.")
            self._send({"id": number, "op": operation, **fields})
            try:
                answer = answers.get(timeout=seconds)
            except queue.Empty:
                self._send({"op": "withdraw", "of": number})
                raise TimeoutError(f"The launcher did not answer within {seconds:g} s.") from None
        finally:
            self._answers.pop(number, None)
        if answer is _ABANDONED:
            raise ChannelClosedError("The group was given up while it was being made.")
        if answer is _CLOSED:
            raise ChannelClosedError(self._end)
        return answer["value"]

    def report(self, what: str, **fields: Any) -> None:
        """Send the launcher a report, which has no answer; `ChannelClosedError` if it has ended."""
        self._send({"report": what, **fields})

    def keep_alive(self, user: object) -> None:
        self._kept.append(user)

    def abandon(self, user: object) -> None:
        """Let all requests for `user` fail, those that wait now too."""
        self._abandoned.add(user)
        for owner, answers in list(self._answers.values()):
            if owner is user:
                answers.put(_ABANDONED)

    def _send(self, message: Message) -> None:
        with self._sending:
            if not self._is_open:
                raise ChannelClosedError(f"The channel to the launcher is closed. {self._end}")
            try:
                self._socket.sendall(encode(message))
            except OSError as error:
                raise ChannelClosedError(self._end) from error

    def _read(self) -> None:
        reader = LineReader()
        try:
            with suppress(OSError):
                while piece := self._socket.recv(_PIECE_BYTES):
                    for message in reader.feed(piece):
                        self._deliver(message)
        finally:  # also after an error in `on_event`: nobody must wait for an answer that nobody reads
            with self._sending:
                self._is_open = False
                self._socket.close()
            for _, answers in list(self._answers.values()):
                answers.put(_CLOSED)

    def _deliver(self, message: Message) -> None:
        if "event" in message:
            self._on_event(message)
            return
        if "refused" in message:
            self._end = (
                "The launcher has closed this worker's channel, because it was sent what it cannot read "
                f"({str(message['refused'])[:200]}). Does something in this process write to descriptors that it has "
                "not opened, or was Lockstep's code replaced while it ran?"
            )
            return
        waiting = self._answers.get(message["id"])
        if waiting is not None:  # else the request was withdrawn
            waiting[1].put(message)

    def _close_in_child(self) -> None:
        self._sending = threading.Lock()  # another thread may have held it at the fork
        self._is_open = False
        self._socket.close()
