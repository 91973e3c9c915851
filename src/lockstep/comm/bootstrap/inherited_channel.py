"""The channel to `lockstep run` that a worker inherits: a way to the other workers that has no port."""

import os
import socket
import stat
from typing import Final

from lockstep.channel.client import Channel
from lockstep.comm.bootstrap.channel_store import ChannelStore
from lockstep.settings import read_settings


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
    if _INHERITED.process != os.getpid():
        if not _is_open(descriptor):
            return None
        _INHERITED.channel = Channel(descriptor, on_event=lambda _message: None)
        _INHERITED.process = os.getpid()
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
