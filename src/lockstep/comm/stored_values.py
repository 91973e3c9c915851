"""What the steps of a set-up share: a deadline, and values in the store, which a stranger may have written."""

import json
import time
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

from lockstep.errors import GroupError

Record = TypeVar("Record")
_SHOWN = 60


def to_stored(record: Any) -> str:
    """Return a dataclass of texts, numbers and truth values as text."""
    return json.dumps(asdict(record))


def read_record(key: str, raw: bytes | str, kind: type[Record]) -> Record:
    """Return what `to_stored` was given; the fields of `kind` are str, int, float, bool or enums of text."""
    found: Record = _read(key, raw, lambda text: _to_record(json.loads(text), kind))
    return found


def read_number(key: str, raw: bytes | str) -> int:
    """Return a whole number that is not negative."""
    return int(_read(key, raw, _to_number))


def read_texts(key: str, raw: bytes | str, count: int) -> list[str]:
    found: list[str] = _read(key, raw, lambda text: _to_texts(json.loads(text), count))
    return found


def _read(key: str, raw: bytes | str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(raw.decode() if isinstance(raw, bytes) else raw)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise changed_value(key, raw) from error


def changed_value(key: str, raw: bytes | str) -> GroupError:
    shown = bytes(raw[:_SHOWN]) if isinstance(raw, bytes) else raw[:_SHOWN]
    return GroupError(
        f"The store of the rendezvous holds {shown!r} under the key {key!r}, which no worker of Lockstep writes. "
        "Another program writes to this store, or workers have different versions of Lockstep. Give each training "
        "a port of its own, which no one else can reach. (LS114)"
    )


def _to_record(found: Any, kind: type[Any]) -> Any:
    types = typing.get_type_hints(kind)
    if not isinstance(found, dict) or set(found) != {each.name for each in fields(kind)}:
        raise TypeError("It has other fields.")
    return kind(**{name: _to_value(value, types[name]) for name, value in found.items()})


def _to_value(value: Any, kind: type[Any]) -> Any:
    if issubclass(kind, Enum) or (kind is float and type(value) is int):
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"A field is {value!r}, expected {kind.__name__}.")
    return value


def _to_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("It is not a number.")
    return int(text)


def _to_texts(found: Any, count: int) -> list[str]:
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, str) for each in found):
        raise TypeError(f"It is not a list of {count} texts.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment on the monotonic clock: made once from a limit and passed down, so that the steps share the limit."""

    end: float
    limit: timedelta
    """The whole time from the start, for messages."""

    @staticmethod
    def after(limit: timedelta) -> "Deadline":
        return Deadline(end=time.monotonic() + limit.total_seconds(), limit=limit)

    def with_at_least(self, seconds: float) -> "Deadline":
        """Return this deadline, or one in so many seconds if that is later: for a step that can hardly wait less."""
        return Deadline(end=max(self.end, time.monotonic() + seconds), limit=self.limit)

    def seconds_left(self, at_least: float = 0.0) -> float:
        """Return how much time is left, or `at_least`: for what needs a moment even when the time is up."""
        return max(self.end - time.monotonic(), at_least)

    def left(self, at_least: float = 0.0) -> timedelta:
        return timedelta(seconds=self.seconds_left(at_least))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    @property
    def used_seconds(self) -> float:
        return self.limit.total_seconds() - (self.end - time.monotonic())
