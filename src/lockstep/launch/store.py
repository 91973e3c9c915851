"""The rendezvous of one host: a store on a port of loopback that the kernel picks, so that no two launches clash."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""What Gloo is kept on."""
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the workers of a launch meet."""

    port: int
    """On loopback."""
    is_served: bool
    """Whether the launcher serves the store; if not, rank 0 does."""


def open_store() -> dist.TCPStore:
    """Open the rendezvous: on loopback, on a port that is never free for another to take."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def open_rendezvous(num_workers: int) -> Iterator[Rendezvous]:
    """Hold the rendezvous of a script's workers.

    A single worker serves its store itself, because a script that goes on to start processes of its own
    (`torch.multiprocessing.spawn`) makes a rendezvous for them, and TORCHELASTIC_USE_AGENT_STORE would send them all
    looking for one that is served already. Its port is kept for it by a socket that is bound and does not listen: the
    kernel gives the port to nobody who asks for any, and to a store, which sets SO_REUSEADDR.
    """
    if num_workers > 1:
        store = open_store()
        yield Rendezvous(store.port, is_served=True)
        return
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        yield Rendezvous(reserved.getsockname()[1], is_served=False)
