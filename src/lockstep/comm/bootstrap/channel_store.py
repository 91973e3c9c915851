"""The store of a launch as torch's `Store`, over the inherited channel to `lockstep run`: a way that has no port."""

import os
import socket
import stat
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, cast, final

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from lockstep.channel.client import Channel, ChannelClosedError
from lockstep.channel.table import to_bytes, to_text
from lockstep.processes.forking import this_process
from lockstep.settings import read_settings


class _User:
    """Stands for a group whose operations are given up together."""


@final
class ChannelStore(Store):
    """The keys and values that the launcher holds, over the channel that this worker inherited.

    It has the operations of `torch.distributed.TCPStore`, apart from queues. A process that this worker forks cannot
    use it.
    """

    def __init__(self, channel: Channel, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        # C++ holds the C++ half of a store alone: without this its Python half would be freed under a PrefixStore.
        channel.keep_alive(self)
        self._channel = channel
        self._user = _User()
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key=key, value=to_text(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        return to_bytes(self._request("get", self._limit, key=key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds, 0 at first; return the sum."""
        return int(self._request("add", key=key, amount=amount))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it holds what is expected, or is not set where that is empty; return what it holds then."""
        expected, desired = to_text(expected_value), to_text(desired_value)
        return to_bytes(self._request("compare_set", key=key, expected=expected, desired=desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", keys=list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request("wait", self._limit if timeout is None else timeout, keys=list(keys))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key, which is empty at first."""
        self._request("append", key=key, value=to_text(value))

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key=key))

    def num_keys(self) -> int:
        return int(self._request("count"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [to_bytes(value) for value in self._request("multi_get", self._limit, keys=list(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> "ChannelStore":
        """Return this store: several threads may use it, which torch makes clones for."""
        return self

    def abandon(self) -> None:
        """Let all operations fail, those that wait now too: the group that they are for will not be made."""
        self._channel.abandon(self._user)

    def renew(self) -> None:
        """Let operations succeed again, for another group."""
        self._user = _User()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - under these names torch's C++ code calls them

    @property
    def _limit(self) -> timedelta:
        """How long to wait for a key, as `set_timeout` has set it."""
        return cast("timedelta", cast("Any", self).timeout)  # torch's type hints lack it

    def _request(self, operation: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        try:
            seconds = None if timeout is None else timeout.total_seconds()
            return self._channel.request(self._user, operation, seconds, **fields)
        except TimeoutError as error:
            keys = fields.get("keys") or [fields["key"]]
            raise DistStoreError(f"No value for {', '.join(map(repr, keys[:3]))} within {timeout}.") from error
        except ChannelClosedError as error:
            raise DistNetworkError(str(error)) from error


def launch_store(store: Store | None) -> ChannelStore | None:
    """Return the store of a launch that is under any prefixes; None if it is another kind of store."""
    found: Any = store
    while isinstance(found, PrefixStore):
        found = found.underlying_store
    return found if isinstance(found, ChannelStore) else None


class _Inherited:
    """This process' channel, once it was asked for."""

    channel: Channel | None = None
    process: int | None = None


_INHERITED: Final = _Inherited()


def inherited_store() -> ChannelStore | None:
    """Return the store that the launcher serves over this worker's channel; None if it has none (local)."""
    descriptor = read_settings().channel()
    if descriptor is None:
        return None
    if _INHERITED.process != this_process():
        if not _is_open(descriptor):
            return None
        _INHERITED.channel = Channel(descriptor, on_event=lambda _message: None)
        _INHERITED.process = this_process()
    assert _INHERITED.channel is not None
    return ChannelStore(_INHERITED.channel)


def _is_open(descriptor: int) -> bool:
    """Whether the descriptor is a pair of sockets still: a program that ran before this one may have closed it."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family == socket.AF_UNIX and found.getsockname() in {"", b""}
