"""The rendezvous of one host: a store on a loopback port that the kernel picks, so that launches never share a port."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.launch.readiness import wait_to_read

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""What Gloo is kept on."""
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the workers of a launch find their store."""

    port: int
    """On loopback."""
    is_served: bool
    """Whether the launcher serves the store; if not, rank 0 does."""
    was_found: threading.Event = field(default_factory=threading.Event)
    """Set when the first process connects to the store that the launcher serves."""


def open_store() -> "TCPStore":
    """Open the rendezvous: on loopback, on a port that is never free for another to take."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(_BACKLOG)
    return _serve(listener)


@contextmanager
def open_rendezvous(num_workers: int) -> Iterator[Rendezvous]:
    """Hold the rendezvous of a script's workers.

    The launcher serves it from the first connection on. A launch whose workers never connect need
    not import torch, which takes a second and 150 MB.

    A single worker serves its store itself, because a script that goes on to start processes of its own
    (`torch.multiprocessing.spawn`) makes a rendezvous for them, and TORCHELASTIC_USE_AGENT_STORE would send them all
    looking for one that is served already. Its port is kept for it by a socket that is bound and does not listen: the
    kernel gives the port to nobody who asks for any, and to a store, which sets SO_REUSEADDR.
    """
    with socket.socket() as reserved:
        if num_workers == 1:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        port = reserved.getsockname()[1]
        if num_workers == 1:
            yield Rendezvous(port, is_served=False)
            return
        reserved.listen(_BACKLOG)
        over, over_writer = os.pipe()
        rendezvous = Rendezvous(port, is_served=True)
        arguments = (reserved, over, rendezvous.was_found)
        serving = threading.Thread(target=_serve_when_asked, args=arguments, name="rendezvous")
        serving.start()
        try:
            yield rendezvous
        finally:
            os.close(over_writer)
            serving.join()
            os.close(over)


def _serve_when_asked(listener: socket.socket, over: int, was_found: threading.Event) -> None:
    """Serve the store from the first connection on, until `over` is closed at its other end."""
    ready = wait_to_read(listener.fileno(), over)
    if over not in ready:
        was_found.set()
        store = _serve(listener)
        wait_to_read(over)
        del store


def _serve(listener: socket.socket) -> "TCPStore":
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
