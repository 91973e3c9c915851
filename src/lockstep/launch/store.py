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
"""The network interface that Gloo uses."""
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the workers of a launch find their store."""

    port: int
    """Its port on loopback."""
    is_served: bool
    """Whether the launcher serves the store; if not, rank 0 does."""
    was_found: threading.Event = field(default_factory=threading.Event)
    """Set when the first process connects to the store that the launcher serves."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a loopback port that the kernel picks, for a store that workers may open themselves.

    The launcher holds a socket that is bound but does not listen. The kernel gives the port to no program that asks for
    any free port, but to a store, which asks for this one and sets SO_REUSEADDR.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        yield reserved.getsockname()[1]


@contextmanager
def open_rendezvous(num_workers: int) -> Iterator[Rendezvous]:
    """Keep the rendezvous of a script's workers open within the block.

    The launcher serves it from the first connection on. So a launch whose workers never connect does not import torch,
    which takes a second and 150 MB.

    A single worker serves its store itself. If its script starts processes of its own (`torch.multiprocessing.spawn`),
    it makes a rendezvous for them, and with TORCHELASTIC_USE_AGENT_STORE they would expect that a launcher serves it.
    """
    if num_workers == 1:
        with reserved_port() as port:
            yield Rendezvous(port, is_served=False)
        return
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(_BACKLOG)
        over, over_writer = os.pipe()
        rendezvous = Rendezvous(listener.getsockname()[1], is_served=True)
        arguments = (listener, over, rendezvous.was_found)
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
