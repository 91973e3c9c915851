"""Whether the program that listens at an address is a store of torch: asked before torch connects to it."""

import enum
import secrets
import socket
import time
from typing import final

from lockstep.torch_private.groups import greeting

_CONNECT_SECONDS = 5.0


@final
class Probe(enum.Enum):
    """What an address has answered."""

    STORE = "a store answers"
    SILENT = "a program listens there, and is no store, or does not answer in time"
    CLOSED = "nobody listens, or the connection was closed: a store may be about to open or to end"


def probe_store(host: str, port: int, seconds: float) -> Probe:
    """Ask the program at an address whether it is a store (local)."""
    asked, expected = greeting(secrets.randbits(32))
    end = time.monotonic() + seconds
    try:
        connection = socket.create_connection((host, port), min(_CONNECT_SECONDS, max(seconds, 0.01)))
    except OSError:
        return Probe.CLOSED
    answer = b""
    with connection:
        try:
            connection.sendall(asked)
            while len(answer) < len(expected):
                connection.settimeout(max(end - time.monotonic(), 0.01))
                piece = connection.recv(len(expected) - len(answer))
                if not piece:
                    return Probe.CLOSED
                answer += piece
        except TimeoutError:
            return Probe.SILENT
        except OSError:
            return Probe.CLOSED
    return Probe.STORE if answer == expected else Probe.SILENT
