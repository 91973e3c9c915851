"""The messages of a channel, one JSON object per line, and the table of keys and values that answers them.

The table has the semantics of torch's `Store`, and is a pure state machine. A request for a key that is not set is
answered when it is set. The worker that waits counts the time; when that is over, it withdraws the request.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    worker: int
    message: Message


@dataclass(slots=True)
class _Waiting:
    worker: int
    request: Message
    missing: set[str]


@final
class Table:
    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[tuple[int, int], _Waiting] = {}

    def answer(self, worker: int, request: Message) -> list[Reply]:
        """Carry out a request; return the answers that can be given now, to this worker and to others that waited.

        `KeyError`, `TypeError` or `ValueError`: it is no request of a `Store`.
        """
        operation, number = request.get("op"), request.get("id")
        if operation in {"get", "wait", "multi_get"}:
            keys = {request["key"]} if operation == "get" else set(request["keys"])
            missing = keys - self._values.keys()
            if not missing:
                return [self._found(worker, request)]
            self._waiting[worker, request["id"]] = _Waiting(worker, request, missing)
            return []
        if operation == "withdraw":
            self._waiting.pop((worker, request["of"]), None)
            return []
        if operation == "check":
            return [Reply(worker, {"id": number, "value": all(key in self._values for key in request["keys"])})]
        if operation == "delete":
            return [Reply(worker, {"id": number, "value": self._values.pop(request["key"], None) is not None})]
        if operation == "count":
            return [Reply(worker, {"id": number, "value": len(self._values)})]
        value, written = self._write(request)
        replies = [Reply(worker, {"id": number, "value": value})]
        return replies if written is None else [*replies, *self._release(written)]

    def forget(self, worker: int) -> None:
        for place in [place for place in self._waiting if place[0] == worker]:
            del self._waiting[place]

    def _write(self, request: Message) -> tuple[str | int, str | None]:
        """Carry out a request that writes; return its answer, and the key that has a value now."""
        operation, key = request.get("op"), request.get("key")
        if not isinstance(key, str):
            raise TypeError(f"A request is {str(request)[:80]}, expected one of torch's Store with a key.")
        present = self._values.get(key)
        if operation == "set":
            self._values[key] = request["value"]
            return "", key
        if operation == "append":
            self._values[key] = (present or "") + request["value"]
            return "", key
        if operation == "add":
            total = int(present or 0) + int(request["amount"])
            self._values[key] = str(total)
            return total, key
        if operation == "compare_set":
            if present == request["expected"] or (present is None and request["expected"] == ""):
                self._values[key] = request["desired"]
                return request["desired"], key
            return (request["expected"] if present is None else present), None
        raise ValueError(f"A request is for {operation!r}, which is not an operation of torch's Store.")

    def _found(self, worker: int, request: Message) -> Reply:
        value: str | list[str] = ""
        if request["op"] == "get":
            value = self._values[request["key"]]
        elif request["op"] == "multi_get":
            value = [self._values[key] for key in request["keys"]]
        return Reply(worker, {"id": request["id"], "value": value})

    def _release(self, key: str) -> list[Reply]:
        """Return the answers to the requests that waited for this key alone."""
        replies = []
        for place, waiting in list(self._waiting.items()):
            waiting.missing.discard(key)
            if not waiting.missing:
                del self._waiting[place]
                missing = set(waiting.request.get("keys", ())) - self._values.keys()
                if missing:  # deleted while it waited for another
                    self._waiting[place] = _Waiting(waiting.worker, waiting.request, missing)
                else:
                    replies.append(self._found(waiting.worker, waiting.request))
        return replies


def encode(message: Message) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def to_text(value: bytes | str) -> str:
    """Return any bytes as a text of as many characters, which JSON can hold."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


def to_bytes(text: str) -> bytes:
    """Return the bytes that `to_text` was given; those of a text that has other characters in UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


@final
class LineReader:
    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Yield the messages that are complete with this piece; `ValueError` or `TypeError` at a line that is none."""
        self._begun += piece
        while (end := self._begun.find(b"\n")) >= 0:
            line = bytes(self._begun[:end])
            del self._begun[: end + 1]
            message = json.loads(line)
            if not isinstance(message, dict):
                raise TypeError(f"A message is {line[:80]!r}, expected a JSON object.")
            yield message
