"""Messages on a stream of bytes: one JSON object per line."""

import json
from collections.abc import Iterator
from typing import Any, final

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return a message as one line."""
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
    """Puts messages together from the pieces in which a stream delivers them."""

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
